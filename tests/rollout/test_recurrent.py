"""Decode loops over a model whose layers have states in place of cached tokens, but for one."""

from __future__ import annotations

import functools

import jax
import numpy as np
import rollout_checks
from rollout_checks import assert_same

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import ring_decode, slot_loop, stopping
from jaxrl_llm.rollout.decode_records import DecodeInputs, Loops
from jaxrl_llm.serving.engine import Engine, Prompt, Row, Sampling
from jaxrl_llm.serving.programs import EngineSettings
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts

P, G, L, T = 4, 3, 7, 13
B = P * G
MODEL = ModelConfig(
  vocab=24, width=16, layers=3, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=64, qk_norm='head',
  output_gate=True, rotary_dim=4, recurrent_layers=(True, False, True), delta_key_heads=1, delta_value_heads=2,
  delta_key_dim=6, delta_value_dim=4, delta_window=3,
)  # fmt: skip
SPEC = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32')
KEY = jax.random.key(1)


@functools.cache
def params():
  """Drawn without a program: a compiled `decoder.init` takes longer than the test, and its taps are all alike."""
  r = np.random.default_rng(0)

  def draw(path, x):
    is_gain = path[-1].key in ('scale', 'gain')
    deviation = 0.2 if x.ndim == 1 else 1.5 * (x.shape[0] if x.ndim == 2 else x.shape[-1]) ** -0.5
    return (is_gain + deviation * r.normal(size=x.shape)).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(MODEL))


@functools.cache
def prompts():
  """Prompts that begin with the same two tokens."""
  r = np.random.default_rng(0)
  length_P = r.integers(3, L + 1, P).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  tokens_PxL[:, :2] = tokens_PxL[:1, :2]
  return Prompts(
    tokens_PxL, length_P, np.arange(P, dtype=np.int32), np.full(P, 2), np.ones(P, np.float32)
  )


def run(spec=SPEC, **inputs):
  call = jax.jit(
    lambda p, q: ring_decode.generate(MODEL, spec, DecodeInputs(p, q, KEY, 0, **inputs))[0]
  )
  return jax.tree.map(np.asarray, call(params(), prompts()))


@functools.cache
def plain():
  return run()


def test_recorded_log_prob_is_that_of_a_forward_pass():
  assert plain().length_B.max() == T > plain().length_B.min()
  real = np.arange(T)[None] < plain().length_B[:, None]
  want = rollout_checks.rescored(MODEL, params(), prompts(), plain())
  np.testing.assert_allclose(plain().logp_BxT[real], want[real], atol=1e-5)


def test_slots_that_change_hands_and_rings_that_grow_change_nothing():
  assert_same(run(SPEC._replace(slots=5, loops=Loops(windows=3))), plain())


def test_a_shared_prefix_changes_nothing():
  assert_same(run(prefix_tokens=2), plain())


def test_fewer_slots_keep_their_states():
  spec = SPEC._replace(max_tokens=64, end_ids=(3,))
  assert_same(run(spec._replace(loops=Loops(halvings=1))), run(spec))


def test_unfinished_rows_are_continued():
  @functools.partial(jax.jit, static_argnums=0)
  def fn(slots, params, prompts, continued):
    spec = SPEC._replace(slots=slots, stop_rule=functools.partial(stopping.rounds, count=3))
    return ring_decode.generate(
      MODEL, spec, DecodeInputs(params, prompts, KEY, 0, continued=continued)
    )[0]

  continued = slot_loop.empty_rollout(B, T)
  for call in range(20):
    continued = fn(5 if call else 0, params(), prompts(), continued)
  assert (np.asarray(continued.reason_B) != UNFINISHED).all()
  assert_same(continued, plain())


def test_an_eight_bit_cache_leaves_states_alone():
  got = run(SPEC._replace(cache_dtype='int8'))
  real = np.arange(T)[None] < got.length_B[:, None]
  want = rollout_checks.rescored(MODEL, params(), prompts(), got)
  np.testing.assert_allclose(got.logp_BxT[real], want[real], atol=0.05)


def test_the_endpoint_gives_the_same_tokens():
  engine = Engine(MODEL, params(), EngineSettings(2, 32, 3, SPEC.end_ids, 'float32', 'float32'))
  tokens, left = [[] for _ in range(P)], P

  def row(p):
    def deliver(delivery):
      nonlocal left
      tokens[p] += [token.id for token in delivery.tokens]
      left -= bool(delivery.end)
      if not left:
        engine.stop()

    prompt = prompts().tokens_PxL[p, : prompts().length_P[p]].tolist()
    return Row(Prompt(prompt), Sampling(T, 0.0), 0, False, deliver)

  engine.submit([row(p) for p in range(P)])
  engine.run()
  greedy = run(SPEC._replace(rollouts=1, temperature=0.0))
  for p, got in enumerate(tokens):
    want = greedy.tokens_BxT[p, : greedy.length_B[p]].tolist()
    # An end token is not delivered.
    assert got == want or got == want[:-1]
