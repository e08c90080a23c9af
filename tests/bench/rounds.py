"""Iterations of the decode loop per finished rollout, on long-tailed lengths: orders, and stopping early.

python tests/bench/rounds.py
Log-normal lengths, half of the log's variance shared by a group of 8, cut at 512 tokens; 64 groups a step,
64 slots, 12 steps. A tiny model runs the real loop, its caps standing for the ends of answers. Where a
rule stops the loop, unfinished groups go on in the next step. An iteration decodes one token for every
slot, so that on a device its time is that of reading the weights once; what continued rows cost in encoding
is told beside.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.generate import engine, order, stopping
from jaxrl_llm.models import decoder
from jaxrl_llm.replay import Unfinished
from jaxrl_llm.types import ModelConfig, Prompts, Rollout

P, G, SLOTS, T, STEPS = 64, 8, 64, 512, 12
MODEL = ModelConfig(
  vocab=8, width=4, layers=1, heads=1, kv_heads=1, head_dim=4, mlp=4, max_tokens=1024
)


def lengths() -> np.ndarray:
  """Tokens of every rollout that any step may begin, [STEPS * P, G]."""
  r = np.random.default_rng(0)
  log = r.normal(size=(STEPS * P, 1)) * 0.7 + r.normal(size=(STEPS * P, G)) * 0.7
  return np.clip(np.exp(4.2 + log), 2, T).astype(np.int32)


def empty() -> Rollout:
  zeros = np.zeros((P * G, T), np.int32)
  one = np.zeros(P * G, np.int32)
  weights, features = np.ones(P * G, np.float32), np.zeros((P * G, 0), np.float32)
  return Rollout(
    zeros, zeros.astype(np.float32), one, one.astype(np.int8), zeros, weights, features
  )


def run(choose, stop) -> tuple[float, float, float]:
  """Rounds, ideal rounds, and tokens encoded again, each per finished rollout."""
  spec = engine.Spec(
    G, T, 1.0, (), 'float32', slots=SLOTS, stop=stop,
    order=lambda p: choose(p._replace(cap_B=jnp.full(P * G, T))),
  )  # fmt: skip
  fn = jax.jit(
    lambda params, prompts, begun, cap: engine.generate(
      MODEL, params, prompts, jax.random.key(0), 0, spec, begun=begun, cap=cap
    )
  )
  params, table, held = decoder.init(MODEL, 0), lengths(), Unfinished(G, max_age=STEPS)
  rounds = tokens = again = finished = begun_at = 0
  for step in range(STEPS):
    count = P - len(held)
    index_P = np.arange(begun_at, begun_at + count, dtype=np.int32)
    begun_at += count
    ones = np.ones(count, np.int32)
    fresh = Prompts(ones[:, None], ones, index_P, ones * step, np.zeros(count, np.float32))
    prompts, begun = held.begin(fresh, empty())
    running = begun.reason_B == 0
    again += begun.length_B[running].sum()
    rollout, took = fn(params, prompts, begun, table[prompts.index_P].reshape(-1))
    rollout = jax.tree.map(np.asarray, rollout)
    tokens += rollout.length_B.sum() - begun.length_B.sum()
    rounds += int(took)
    whole_P, _ = held.keep(prompts, rollout, step)
    finished += whole_P.sum() * G
  return rounds / finished, tokens / SLOTS / finished, again / finished


def main() -> None:
  never, half = stopping.none, functools.partial(stopping.groups, fraction=0.5)
  three = functools.partial(stopping.groups, fraction=0.75)
  cases = {
    'fifo': (order.fifo, never),
    'probe, then longest': (order.probe_then_longest, never),
    'fifo, until 3/4 of the groups are whole': (order.fifo, three),
    'fifo, until half of the groups are whole': (order.fifo, half),
  }
  print(f'{"rounds per finished rollout":44} measured   ideal   ratio   encoded again')
  for name, case in cases.items():
    rounds, ideal, again = run(*case)
    print(f'{name:44} {rounds:8.3f} {ideal:7.3f} {rounds / ideal:7.2f} {again:10.1f} tokens')


if __name__ == '__main__':
  main()
