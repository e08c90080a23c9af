"""The queue of decode_seconds: its iterations are those of the real loop, its columns those of the kernel."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm.models import decode_attention, decoder
from jaxrl_llm.rollout import ring_decode
from jaxrl_llm.rollout.decode_records import DecodeInputs, Loops
from jaxrl_llm.types import ModelConfig, Prompts
from tests.bench.lib import decode_queue

P, G, T = 8, 4, 64
MODEL = ModelConfig(
  vocab=8, width=4, layers=1, heads=1, kv_heads=1, head_dim=4, mlp=4, max_tokens=128
)


def draw_lengths(seed=0):
  drawn = np.random.default_rng(seed).lognormal(np.log(20), 0.8, P * G)
  return drawn.round().clip(2, T).astype(np.int32)


@pytest.mark.parametrize('slots, halvings', [(8, 0), (P * G, 2)])
def test_iterations_are_those_of_the_real_loop(slots, halvings):
  """Caps set the lengths. Going on with fewer slots changes no iteration."""
  settings = ring_decode.DecodeSettings(
    G, T, 1.0, (), 'float32', slots=slots, loops=Loops(halvings=halvings)
  )
  ones = np.ones(P, np.int32)
  prompts = Prompts(ones[:, None], ones, np.arange(P, dtype=np.int32), ones, ones * np.float32(0))
  run = jax.jit(
    lambda params, cap_B: ring_decode.generate(
      MODEL, settings, DecodeInputs(params, prompts, jax.random.key(0), 0, cap=cap_B)
    )
  )
  params = decoder.init(MODEL, 0)
  for seed in range(3):
    length_B = draw_lengths(seed)
    rollout, iterations = run(params, length_B)
    np.testing.assert_array_equal(rollout.length_B, length_B)
    assert iterations == decode_queue.first_in_first_out(length_B, slots).iterations


def test_a_freed_slot_takes_the_next_row():
  schedule = decode_queue.first_in_first_out(np.array([4, 2, 3, 6]), 2)
  assert schedule.begin_B.tolist() == [0, 0, 1, 3] and schedule.end_B.tolist() == [3, 1, 3, 8]
  np.testing.assert_array_equal(decode_queue.busy(schedule, 9), [2, 2, 2, 1, 1, 1, 1, 1, 0])
  read_I = decode_queue.columns_read(schedule, 8, decode_queue.pages(2))
  np.testing.assert_array_equal(read_I, [4, 4, 6, 2, 2, 4, 4, 6])


def test_live_blocks_are_those_of_the_kernel():
  W, C = 80, 8
  columns = decode_queue.live_blocks(W, C)
  for begin in (0, 3, 75, 163):
    age_N = np.arange(W - 1)
    newest_N = (begin + age_N) % W
    places = decode_attention.Columns(age_N * 0, newest_N, age_N + 1)
    kernel_N = C * np.asarray(decode_attention.blocks_of_rows(places, W, C)[1])
    np.testing.assert_array_equal(columns(begin, age_N), kernel_N)


def test_more_slots_fit_than_rings_where_most_rows_are_short():
  length_SxB = np.stack([draw_lengths(seed) for seed in range(2)])
  memory = 8 * T
  slots = decode_queue.most_slots(length_SxB, decode_queue.pages(8), memory, 8)
  assert 8 < slots < P * G
  held = lambda n: max(  # noqa: E731
    decode_queue.columns_read(s, s.iterations, decode_queue.pages(8)).max() + 8 * n
    for s in (decode_queue.first_in_first_out(x, n) for x in length_SxB)
  )
  assert held(slots) <= memory < held(slots + 1)
