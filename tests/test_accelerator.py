"""A step and a run on an accelerator; without one, all tests are skipped, and others prove the same programs on CPUs.

    XLA_FLAGS=--xla_gpu_deterministic_ops=true JAX_PLATFORMS=cuda,cpu python -m pytest tests/test_accelerator.py

Without the flag, two steps in bfloat16 differed on an H200, likely as GPUs add the gradients of equal tokens in any
order: the tests of equal bits are then skipped.
"""

from __future__ import annotations

import os
import shutil

import jax
import numpy as np
import pytest
import tiny_job

from jaxrl_llm import step as steps
from jaxrl_llm import train
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.types import Batch, ModelConfig, Prompts

pytestmark = pytest.mark.skipif(jax.default_backend() == 'cpu', reason='needs an accelerator')

same_bits = pytest.mark.skipif(
  jax.default_backend() == 'gpu'
  and 'xla_gpu_deterministic_ops=true' not in os.environ.get('XLA_FLAGS', ''),
  reason='needs XLA_FLAGS=--xla_gpu_deterministic_ops=true',
)

MODEL = ModelConfig(
  vocab=50, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96, max_tokens=64
)
P, G, L, T = 4, 4, 8, 6


def two_steps(device, **changes):
  """Tokens, log-probs and weights of two steps from the same weights, and the metrics of the second."""
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.optimizer.learning_rate, c.optimizer.fn = 0.1, 'optax:sgd'  # Adam would divide noise by noise
  for name, value in changes.items():
    section, _, field = name.rpartition('__')
    (c[section] if section else c)[field] = value
  spec = make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, [device]))
  r = np.random.default_rng(0)
  index_P = np.arange(P, dtype=np.int32)
  prompts = Prompts(
    r.integers(0, 50, (P, L)).astype(np.int32), r.integers(1, L + 1, P).astype(np.int32), index_P,
    index_P * 0, np.zeros(P, np.float32),
  )  # fmt: skip
  with jax.default_device(jax.devices('cpu')[0]):
    params = jax.tree.map(np.asarray, decoder.init(MODEL, 0))
  state, run = train_state.init_state(spec, params), steps.compile_step(spec)
  batch = empty_records.empty_batch(spec)
  for _ in range(2):
    state, rollout, metrics = run(state, batch, prompts, None, None, np.int32(T))
    rollout = jax.tree.map(np.asarray, rollout)
    reward_B = (rollout.tokens_BxT[:, 0] % 2).astype(np.float32)
    batch = Batch(prompts, rollout, reward_B, reward_B)
  return rollout, jax.tree.map(np.asarray, state.params), metrics


def error(x, reference) -> float:
  """‖x − reference‖ / ‖reference‖ over all leaves."""
  pairs = [*zip(jax.tree.leaves(x), jax.tree.leaves(reference), strict=True)]
  total = lambda xs: np.sqrt(sum(np.square(np.float64(x)).sum() for x in xs))  # noqa: E731
  return total(a - np.float64(b) for a, b in pairs) / total(b for _, b in pairs)


def test_a_float32_step_is_that_of_the_cpu():
  """The same tokens, since noise is keyed and not drawn from the device, and the same weights up to rounding."""
  with jax.default_matmul_precision('highest'):
    found, expected = (
      two_steps(device, dtype='float32') for device in (jax.devices()[0], jax.devices('cpu')[0])
    )
  np.testing.assert_array_equal(found[0].tokens_BxT, expected[0].tokens_BxT)
  assert error(found[0].logp_BxT, expected[0].logp_BxT) < 1e-5
  assert error(found[1], expected[1]) < 1e-5
  assert float(found[2]['actor/grad_norm']) > 0


@same_bits
@pytest.mark.parametrize('attention', ['auto', 'xla'])
def test_a_bfloat16_step_is_repeated_bit_for_bit(attention):
  a, b = (two_steps(jax.devices()[0], learner__attention=attention) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, a[:2], b[:2])


@same_bits
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
  whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
  config = configs.load(tiny_job.config_file(tmp_path, steps=6, checkpoint=dict(every=3, keep=2)))
  train.run(config, str(whole))
  shutil.copytree(whole, resumed)
  _, last = sorted((resumed / 'checkpoints').glob('step_*'))
  shutil.rmtree(last)
  train.run(config, str(resumed))
  assert len(list((resumed / 'checkpoints').glob('step_*'))) == 2
  assert tiny_job.rows(resumed) == tiny_job.rows(whole)
