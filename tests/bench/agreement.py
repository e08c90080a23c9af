"""Log-probs of the sampler against those of the update in bfloat16: which parts differ, what mends them, at what cost.

    python -m tests.bench.agreement [--part=layers|mends|time] [--write] [--smoke]

A random decoder of Qwen3's parts samples with the decode loop of the step; the update computes the log-probs of the
same tokens. `layers` records the values of both inside the layers, `mends` adds the parts of
`learner.agreement=exact` one by one and leaves each of them out, `time` alternates whole steps with and without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np

from jaxrl_llm import step as steps
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.types import Batch
from tests.bench.lib import agreement_taps, results, smoke
from tests.bench.lib.agreement_job import (
  MENDS,
  QWEN3,
  SMOLLM2,
  Gap,
  Sizes,
  measure,
  prompts,
  sample_without_mesh,
  score,
  step_spec,
  weights,
)

ARMS = ('off', 'exact')
_GAP_HEADER = ['differing log-probs', 'mean abs. difference', 'largest']


def gap_cells(gap: Gap) -> list[str]:
  """Cells of a table."""
  return [f'{100 * gap.differing:.2f} %', f'{gap.mean:.1e}', f'{gap.largest:.1e}']


def layers(shape: dict, sizes: Sizes) -> None:
  """Of each part, the share of values that differ, over all layers and tokens."""
  found, gaps = {}, {}
  for arm in ARMS:
    spec = step_spec(shape, sizes, learner__agreement=arm)
    config, params, batch = spec.model.config, weights(spec), prompts(spec)
    options = {'xla_allow_excess_precision': arm == 'off'}
    tapes = agreement_taps.Tape(), agreement_taps.Tape()
    with agreement_taps.recording(tapes[0], config):
      sample = jax.jit(sample_without_mesh, static_argnums=0, compiler_options=options)
      rollout = jax.block_until_ready(sample(spec, params, batch))
    with agreement_taps.recording(tapes[1], config):
      learn = jax.jit(score, static_argnums=0, compiler_options=options)
      learned_BxT = jax.block_until_ready(learn(spec, params, batch, rollout))
    jax.effects_barrier()
    tables = [
      agreement_taps.by_token(t, config.layers, n) for t, n in zip(tapes, (1, 0), strict=True)
    ]
    found[arm] = agreement_taps.differing(*tables, config.layers)
    gaps[arm] = Gap.of(rollout, learned_BxT)
  header = ['part', *(f'{arm}: {what}' for arm in ARMS for what in ('all', 'of equal inputs'))]
  rows = [
    [part, *(f'{100 * share:.3f} %' for arm in ARMS for share in found[arm][part])]
    for part in agreement_taps.PARTS
  ]
  print(
    'Values that differ, over all layers; recording makes the compiler round what it records.\n'
  )
  print(results.table(header, rows), '\n')
  rows = [[arm, str(gaps[arm].tokens), *gap_cells(gaps[arm])] for arm in ARMS]
  print(results.table(['agreement', 'tokens', *_GAP_HEADER], rows), flush=True)


def mends(shape: dict, sizes: Sizes, count: int) -> None:
  """The gap with the first n mends, and with all but one."""
  off, spec = (step_spec(shape, sizes, learner__agreement=arm) for arm in ARMS)
  names = list(MENDS)[:count]
  print(results.table(['mends, one added after the other', *_GAP_HEADER], []))
  print('\n'.join(_row('none', measure(off))), flush=True)
  for n, name in enumerate(names):
    gap = measure(spec, frozenset(list(MENDS)[: n + 1]))
    print('\n'.join(_row(f'{name}: {MENDS[name]}', gap)), flush=True)
  print()
  print(results.table(['all mends but', *_GAP_HEADER], []))
  for name in names:
    print('\n'.join(_row(name, measure(spec, frozenset(MENDS) - {name}))), flush=True)


def _row(title: str, gap: Gap) -> list[str]:
  return results.table([title, *gap_cells(gap)], []).splitlines()[:1]


def seconds(shape: dict, sizes: Sizes, turns: int) -> None:
  """Whole steps, alternating: medians, and the median of the ratios of neighbors."""
  calls = {arm: _step(step_spec(shape, sizes, learner__agreement=arm)) for arm in ARMS}
  times: dict[str, list[float]] = {arm: [] for arm in ARMS}
  for _ in range(turns):
    for arm, call in calls.items():
      began = time.perf_counter()
      call()
      times[arm].append(time.perf_counter() - began)
  ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
  cells = [f'{statistics.median(times[arm]):.3f}' for arm in ARMS]
  title = f'{shape["layers"]} layers of {shape["width"]}, vocabulary {shape["vocab"]}'
  print(results.table([title, *cells, f'{ratio:.2f}'], []).splitlines()[0], flush=True)


def _step(spec):
  """One call of the whole step, compiled and called twice; all rows of a batch are learned."""
  state = train_state.init_state(spec, weights(spec))
  step, batch, T = steps.compile_step(spec), empty_records.empty_batch(spec), 0
  T = np.int32(spec.rollout.decode.max_tokens)
  random = np.random.default_rng(0)

  def call() -> None:
    nonlocal state, batch
    asked = prompts(spec)
    state, rollout, _ = jax.block_until_ready(step(state, batch, asked, None, None, T))
    score_B = random.normal(size=len(rollout.length_B)).astype(np.float32)
    batch = Batch(asked, jax.tree.map(np.asarray, rollout), score_B, score_B)

  call()
  call()
  return call


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--part', choices=('layers', 'mends', 'time', 'all'), default='all')
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--completion-tokens', type=int, default=40)
  parser.add_argument('--turns', type=int, default=9)
  parser.add_argument('--mends', type=int, default=len(MENDS), help='so many of them')
  options = smoke.parse(parser, layers=1, completion_tokens=6, turns=1, mends=1)
  sizes = Sizes(completion_tokens=options.completion_tokens)
  qwen3, smollm2 = (shape | dict(layers=options.layers) for shape in (QWEN3, SMOLLM2))
  if options.smoke:
    smollm2 = qwen3 = qwen3 | dict(vocab=256, width=64, heads=2, kv_heads=1, head_dim=32, mlp=64)
  if options.part in ('layers', 'all'):
    layers(qwen3, sizes)
    print()
  if options.part in ('mends', 'all'):
    mends(qwen3, sizes, options.mends)
    print()
  if options.part in ('time', 'all'):
    print(results.table(['seconds of a step', 'off', 'exact', 'ratio'], []))
    for shape in (qwen3, smollm2):
      seconds(shape, sizes, options.turns)


if __name__ == '__main__':
  main()
