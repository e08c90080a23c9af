"""Hidden states of prompts: those of transformers, whatever the padding, stored before the curriculum observes them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm.config import loading
from jaxrl_llm.curriculum.prompt_features import PromptFeatures
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.models import huggingface, shared_prompt_forward
from jaxrl_llm.runner import host_step, prompt_encoding, setup
from jaxrl_llm.runner.context import PendingStep
from jaxrl_llm.types import Prompts, Rollout

P, L = 4, 12


def prompts_of(rows, width=L):
  tokens_PxL = np.zeros((len(rows), width), np.int32)
  for tokens_L, row in zip(tokens_PxL, rows, strict=True):
    tokens_L[: len(row)] = row
  length_P = np.array([len(row) for row in rows], np.int32)
  index_P = np.arange(len(rows), dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P, index_P * 0, np.zeros(len(rows), np.float32))


def test_features_are_those_of_the_last_hidden_state_of_transformers(tmp_path):
  """After the final norm, from left-padded rows there and right-padded ones here."""
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3)
  heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
  torch.manual_seed(0)
  theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)).eval()
  with torch.no_grad():
    theirs.model.norm.weight.uniform_(0.5, 2.0)  # 1 would hide a state before the norm
  theirs.save_pretrained(tmp_path)
  config, _ = huggingface.read_config(str(tmp_path))
  params = huggingface.load_params(str(tmp_path), config)
  random = np.random.default_rng(0)
  rows = [random.integers(1, 97, n) for n in (3, 12, 7, 1, 9, 12, 5, 2)]
  right = prompts_of(rows)
  hidden = shared_prompt_forward.last_hidden(config, params, right, dtype='float32')
  left = torch.tensor(np.stack([np.roll(t, L - n) for t, n in zip(*right[:2], strict=True)]))
  mask = torch.arange(L)[None] >= L - torch.tensor(right.length_P)[:, None]
  with torch.no_grad():
    out = theirs(input_ids=left.long(), attention_mask=mask.long(), output_hidden_states=True)
  expected = out.hidden_states[-1][:, -1].numpy()
  np.testing.assert_allclose(hidden, expected, atol=2e-5)
  before_norm = out.hidden_states[-2][:, -1].numpy()
  assert np.abs(expected - before_norm).max() > 0.1
  features = PromptFeatures(len(rows), 3, 1, 0)
  features.fit(expected)
  features.put(right.index_P, np.asarray(hidden))
  projected = (expected - features.state['center']) @ features.state['basis']
  np.testing.assert_allclose(features.state['values'], projected, atol=5e-3)  # float16


def small(**changes):
  c = loading.load('dapo')
  c.curriculum.prior_pooling = loading.load('hidden_state').curriculum.prior_pooling
  c.model = 'scratch'
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64, experts=0)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, 4, L, 8
  c.learner.microbatch_tokens = c.sft.steps = c.evaluation.prompts = 0
  c.data.source, c.data.path, c.data.size, c.data.chat, c.data.template = (
    'digits',
    '',
    40,
    False,
    '{question}',
  )
  c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
  c.curriculum.prior_pooling.update(dimensions=3, multiple=2)
  c.update(changes)
  return c


def built(config):
  return setup.build_context(config, sharding.make_mesh(config.mesh, jax.devices()[:1]))


@pytest.fixture(scope='module')
def run():
  """A context, its initial state and its program, of which every test makes curricula of its own."""
  context = built(small())
  params = context.models.policy.params
  return (
    context,
    train_state.init_state(context.spec, params),
    prompt_encoding.compile_call(context),
  )


def test_a_step_encodes_its_own_prompts_first_and_all_of_them_alone(run):
  """The states of prompts do not depend on the other rows of their call."""
  context, state, encode = run
  own = np.array([7, 3, 11, 0], np.int32)
  encoded = sharding.fetch(encode(0, state, own))
  assert encoded.index_M[:P].tolist() == own.tolist() and len(encoded.index_M) == P + 40
  hidden_MxD = np.concatenate(encoded.hidden)
  assert hidden_MxD.dtype == np.float32
  dtype, table = context.spec.model.dtype, context.tables.train
  for row in (0, 2, 17):
    alone = table.prompts(encoded.index_M[row : row + 1])
    expected = shared_prompt_forward.last_hidden(
      context.spec.model.config, state.params, alone, dtype=dtype
    )
    np.testing.assert_allclose(hidden_MxD[row], np.float32(expected[0]), atol=3e-2)  # bfloat16


def test_a_pending_step_carries_its_states_through_a_checkpoint(run):
  context, state, encode = run
  encoded = encode(0, state, np.arange(P, dtype=np.int32))
  prompts = context.tables.train.prompts(np.arange(P))
  rollout = Rollout(*[None] * len(Rollout._fields))
  pending = PendingStep(3, prompts, rollout, {}, encoded=encoded)
  back = host_step.unpacked(host_step.packed(pending)).encoded
  np.testing.assert_array_equal(back.index_M, encoded.index_M)
  np.testing.assert_array_equal(np.concatenate(back.hidden), np.concatenate(encoded.hidden))
  assert 'encoded' not in host_step.packed(pending._replace(encoded=None))


def test_the_first_states_fix_the_projection_and_later_ones_keep_it(run):
  context, state, encode = run
  features = PromptFeatures(40, 3, 2, 0)
  prompt_encoding.store(features, sharding.fetch(encode(0, state, np.arange(P))))
  assert features.ready and features.state['known'].all()
  basis = features.state['basis'].copy()
  prompt_encoding.store(features, sharding.fetch(encode(1, state, np.arange(P) + P)))
  np.testing.assert_array_equal(features.state['basis'], basis)


def test_other_priors_compile_no_program():
  config = small()
  config.curriculum.prior_pooling = loading.load('dapo').curriculum.prior_pooling
  assert prompt_encoding.compile_call(built(config)) is None
