"""Decode iterations and device time per finished rollout with long-tailed lengths: queue orders and stop rules.

python -m tests.bench.rounds [--width 256 --layers 4 --steps 6 --smoke]
Log-normal lengths, half of the log's variance shared by a group of 8, cut at 512 tokens; 64 groups a step,
64 slots. A model with random weights runs the real loop; caps on rows simulate end tokens. If a rule stops
the loop, unfinished groups continue in the next step. An iteration decodes one token for every slot, so that on an
accelerator its time is one read of the weights. Also printed: tokens of continued rows that are encoded again, and the
time of generation with prefill and without compilation. On a CPU this is CPU time, which other processes disturb least;
the default model is too small for it to be meaningful.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import decoder
from jaxrl_llm.replay import PartialRollouts
from jaxrl_llm.rollout import queue_order, ring_decode, stopping
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import ModelConfig, Prompts, Rollout
from tests.bench.lib import smoke

P, G, SLOTS, T = 64, 8, 64, 512
HEAD = 64


class Cost(NamedTuple):
  """Costs per finished rollout."""

  rounds: float
  ideal: float  # iterations, if every slot were busy in all of them
  again: float  # tokens of unfinished rollouts that were encoded once more
  ms: float  # of the device; of a CPU, CPU time


def model_of(width: int, layers: int) -> ModelConfig:
  heads = max(1, width // HEAD)
  return ModelConfig(
    vocab=64, width=width, layers=layers, heads=heads, kv_heads=heads, head_dim=min(width, HEAD),
    mlp=4 * width, max_tokens=1024,
  )  # fmt: skip


def lengths(steps: int) -> np.ndarray:
  """Lengths in tokens of all rollouts that steps may begin, [steps * P, G]."""
  r = np.random.default_rng(0)
  log = r.normal(size=(steps * P, 1)) * 0.7 + r.normal(size=(steps * P, G)) * 0.7
  return np.clip(np.exp(4.2 + log), 2, T).astype(np.int32)


def empty() -> Rollout:
  zeros = np.zeros((P * G, T), np.int32)
  one = np.zeros(P * G, np.int32)
  weights, features = np.ones(P * G, np.float32), np.zeros((P * G, 0), np.float32)
  return Rollout(
    zeros, zeros.astype(np.float32), one, one.astype(np.int8), zeros, weights, features
  )


def compiled(model: ModelConfig, choose, stop):
  """One program for all steps: (params, prompts, begun, cap) → rollout and rounds."""
  spec = ring_decode.DecodeSettings(
    G, T, 1.0, (), 'float32', slots=SLOTS, stop_rule=stop,
    queue_order=lambda p: choose(p._replace(cap_B=jnp.full(P * G, T))),
  )  # fmt: skip
  fn = jax.jit(
    lambda params, prompts, begun, cap: ring_decode.generate(
      model, spec, DecodeInputs(params, prompts, jax.random.key(0), 0, continued=begun, cap=cap)
    )
  )
  one = np.ones(P, np.int32)
  prompts = Prompts(one[:, None], one, one, one, np.zeros(P, np.float32))
  shapes = jax.eval_shape(lambda: decoder.init(model, 0))
  return fn.lower(shapes, prompts, empty(), np.ones(P * G, np.int32)).compile()


class Call(NamedTuple):
  """One rollout of the real loop."""

  rounds: int
  tokens: int
  again: int  # tokens of unfinished rollouts that were encoded once more
  finished: int  # rollouts
  seconds: float


def calls(model: ModelConfig, steps: int, choose, stop) -> Iterator[Call]:
  """Takes `steps` steps, each of which continues the unfinished groups of the one before."""
  fn, clock = compiled(model, choose, stop), _clock()
  params, table, partial = decoder.init(model, 0), lengths(steps), PartialRollouts(G, max_age=steps)
  begun_at = 0
  for step in range(steps):
    count = P - len(partial)
    index_P = np.arange(begun_at, begun_at + count, dtype=np.int32)
    begun_at += count
    ones = np.ones(count, np.int32)
    fresh = Prompts(ones[:, None], ones, index_P, ones * step, np.zeros(count, np.float32))
    prompts, begun = partial.begin(fresh, empty())
    began = clock()
    rollout, took = jax.block_until_ready(
      fn(params, prompts, begun, table[prompts.index_P].reshape(-1))
    )
    seconds = clock() - began
    rollout = jax.tree.map(np.asarray, rollout)
    tokens = int(rollout.length_B.sum() - begun.length_B.sum())
    again = int(begun.length_B[begun.reason_B == 0].sum())
    finished_P, _ = partial.keep(prompts, rollout, step)
    yield Call(int(took), tokens, again, int(finished_P.sum()) * G, seconds)


def run(model: ModelConfig, steps: int, choose, stop) -> Cost:
  rounds, tokens, again, finished, seconds = np.sum([*calls(model, steps, choose, stop)], axis=0)
  return Cost(
    rounds / finished, tokens / SLOTS / finished, again / finished, 1e3 * seconds / finished
  )


def iterations(steps: int, fraction: float) -> list[int]:
  """Decode iterations of each step of the smallest model, until that share of the groups is complete."""
  stop = functools.partial(stopping.groups, fraction=fraction)
  return [call.rounds for call in calls(model_of(4, 1), steps, queue_order.fifo, stop)]


def _clock():
  return time.process_time if jax.default_backend() == 'cpu' else time.perf_counter


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--width', type=int, default=4, help='of the model')
  parser.add_argument('--layers', type=int, default=1)
  parser.add_argument('--steps', type=int, default=12)
  options = smoke.parse(parser, steps=2)
  model = model_of(options.width, options.layers)
  never, half = None, functools.partial(stopping.groups, fraction=0.5)
  three = functools.partial(stopping.groups, fraction=0.75)
  cases = {
    'fifo': (queue_order.fifo, never),
    'probe, then longest': (queue_order.probe_then_longest, never),
    'fifo, until 3/4 of the groups are whole': (queue_order.fifo, three),
    'fifo, until half of the groups are whole': (queue_order.fifo, half),
  }
  print(f'{"per finished rollout":44}   rounds   ideal   ratio   encoded again   device time')
  for name, case in cases.items():
    cost = run(model, options.steps, *case)
    print(
      f'{name:44} {cost.rounds:8.3f} {cost.ideal:7.3f} {cost.rounds / cost.ideal:7.2f} '
      f'{cost.again:8.1f} tokens {cost.ms:10.1f} ms',
      flush=True,
    )


if __name__ == '__main__':
  main()
