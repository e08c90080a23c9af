"""The update of a reward model against the loss of TRL's RewardTrainer and its gradient in transformers."""

from __future__ import annotations

import collections
import dataclasses
import types

import jax
import numpy as np
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.config import loading, schema
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import preference_update
from jaxrl_llm.models import export, huggingface, reward_model
from jaxrl_llm.types import Model

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
reward_trainer = pytest.importorskip('trl.trainer.reward_trainer')

LENGTHS = ((5, 9), (12, 3), (1, 2), (7, 7), (20, 11), (4, 6))
PAD = 98


def pairs(r):
  """Pairs of token ids with a margin each, in TRL's format."""
  return [
    dict(
      chosen_ids=r.integers(0, 90, chosen).tolist(),
      rejected_ids=r.integers(0, 90, rejected).tolist(),
      margin=float(r.normal()),
    )
    for chosen, rejected in LENGTHS
  ]


def padded(rows, width=32):
  """The same pairs as the update takes them."""
  tokens_Nx2xS = np.zeros((len(rows), 2, width), np.int32)
  length_Nx2 = np.zeros((len(rows), 2), np.int32)
  for n, row in enumerate(rows):
    for side, name in enumerate(('chosen_ids', 'rejected_ids')):
      tokens_Nx2xS[n, side, : len(row[name])] = row[name]
      length_Nx2[n, side] = len(row[name])
  margin_N = np.array([row['margin'] for row in rows], np.float32)
  return preference_update.Pairs(tokens_Nx2xS, length_Nx2, margin_N)


def random_model(path):
  torch.manual_seed(0)
  config = transformers.Qwen2Config(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=PAD,
  )  # fmt: skip
  model = transformers.Qwen2ForSequenceClassification(config)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  model.save_pretrained(path)
  return model


def trl(model, rows, center):
  """TRL's loss, its metrics and the gradient of every tensor."""
  collate = reward_trainer.DataCollatorForPreference(pad_token_id=PAD)
  metrics = dict(train=collections.defaultdict(list))
  trainer = types.SimpleNamespace(
    model=model.train(),
    args=types.SimpleNamespace(center_rewards_coefficient=center),
    accelerator=types.SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
    _metrics=metrics,
    _total_train_tokens=0,
    _tp_size=1,
  )
  loss = reward_trainer.RewardTrainer.compute_loss(trainer, model, collate.torch_call(rows))
  loss.backward()
  gradient = {name: p.grad.numpy() for name, p in model.named_parameters()}
  return loss.item(), {k: v[0] for k, v in metrics['train'].items()}, gradient


@pytest.mark.parametrize('tokens', [1, 128, 10**6])
@pytest.mark.parametrize('center', [None, 0.3])
def test_loss_and_gradient_equal_those_of_trl(tmp_path, center, tokens):
  """In one pass over all pairs, in two, and pair by pair."""
  other = random_model(tmp_path)
  rows = pairs(np.random.default_rng(1))
  want, want_metrics, want_gradient = trl(other, rows, center)
  config, _ = huggingface.read_config(str(tmp_path))
  config = dataclasses.replace(config, tied=True)
  params = huggingface.load_params(str(tmp_path), config, ('score.weight',))
  model = Model(config, params, None, str(tmp_path))
  mesh = sharding.make_mesh(schema.MeshConfig(fsdp=1), jax.devices()[:1])
  spec = preference_update.PairSpec(
    model=model.config,
    optimizer=optax.sgd(1.0),
    schedule=lambda _: 1.0,
    center_coef=center or 0.0,
    dtype='float32',
    remat=False,
    microbatch_tokens=tokens,
    layout=preference_update.Layout(mesh, sharding.RULES),
  )
  head_D = huggingface.load_tensor(str(tmp_path), 'score.weight', (1, 32))[0]
  before = dict(decoder=model.params, score=dict(kernel=head_D))
  state = preference_update.State(before, spec.optimizer.init(before), 0)
  state = jax.tree.map(jax.numpy.array, state)
  after, metrics = preference_update.compile_update(spec)(state, padded(rows))
  gradient = jax.tree.map(lambda old, new: np.asarray(old) - new, before, after.params)
  got = dict(export.named_tensors(model._replace(params=gradient['decoder'])))
  got['score.weight'] = gradient['score']['kernel'][None]
  assert got.keys() == want_gradient.keys()
  for name, value in want_gradient.items():
    np.testing.assert_allclose(got[name], value, rtol=0, atol=3e-6, err_msg=name)
  np.testing.assert_allclose(metrics['reward_model/loss'], want, rtol=1e-5)
  for name in ('accuracy', 'margin', 'mean_reward'):
    np.testing.assert_allclose(
      metrics[f'reward_model/{name}'], want_metrics[name], rtol=1e-4, atol=1e-5
    )
  square = sum((value.astype(np.float64) ** 2).sum() for value in want_gradient.values())
  np.testing.assert_allclose(metrics['actor/grad_norm'], square**0.5, rtol=1e-5)


SIZES = schema.ScratchConfig(width=16, layers=2, heads=4, kv_heads=2, mlp=32, max_tokens=64)


def job(mesh, sizes=SIZES):
  """A spec and a first state of a small random decoder."""
  c = schema.typed(loading.load('', ['--config.learner.microbatch_tokens=128', '--config.steps=1']))
  model = reward_model.without_language_head(models.load('scratch', scratch=sizes))
  count = int(np.prod(list(mesh.values())))
  on = sharding.make_mesh(schema.MeshConfig(**mesh), jax.devices()[:count])
  spec = preference_update.make_spec(c, model.config, on)
  return spec, preference_update.init_state(spec, model.params, 0)


def to_host(tree):
  return jax.tree.map(np.asarray, tree)


def test_a_gradient_that_is_not_finite_changes_nothing():
  """But the number of skipped steps in a row, which the next step sets back."""
  spec, state = job(dict(fsdp=1))
  before, batch = to_host(state), padded(pairs(np.random.default_rng(0)))
  update = preference_update.compile_update(spec)
  state, metrics = update(state, batch._replace(margin_N=np.full(len(LENGTHS), np.nan, 'f4')))
  assert not np.isfinite(metrics['actor/grad_norm']) and metrics['actor/skipped_updates'] == 1
  unchanged = before._replace(skipped=np.int32(1))
  jax.tree.map(np.testing.assert_array_equal, unchanged, to_host(state))
  state, metrics = update(state, batch)
  assert np.isfinite(metrics['actor/grad_norm']) and metrics['actor/skipped_updates'] == 0


@pytest.mark.parametrize(
  'mesh, experts',
  [
    (dict(data=2, fsdp=2, tensor=2), 0),
    (dict(fsdp=8), 0),  # more than pairs, of which there are 6
    (dict(fsdp=2, context=2), 0),
    (dict(fsdp=2, expert=2, decode=2), 4),
  ],
  ids=str,
)
def test_several_devices_compute_what_one_does(mesh, experts):
  """Scores, metrics and the gradient."""
  sizes = dataclasses.replace(SIZES, experts=experts)
  batch = padded(pairs(np.random.default_rng(0)))
  found = []
  for axes in (dict(fsdp=1), mesh):
    spec, state = job(axes, sizes)
    spec = spec._replace(optimizer=optax.sgd(1.0))
    state = state._replace(opt_state=spec.optimizer.init(state.params))
    scores = preference_update.compile_scores(spec)(state.params, batch)
    after, metrics = preference_update.compile_update(spec)(state, batch)
    found.append(to_host((scores, after.params, metrics)))
  assert np.ptp(found[0][0]) > 0.01
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), *found)
