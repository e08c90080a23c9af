"""Selection rules for prompts, compared on simulated learners and on logs of real runs.

python -m tests.bench.curriculum [--seeds 5] [--worlds medium,hard+drift] [--rules 'uniform;mopps'] [--smoke]
python -m tests.bench.curriculum --replay RUN_FOLDER

Every rule gets the same number of rollouts, the same worlds and the same seeds; differences to `uniform` are
paired, with 95 % intervals of Student's t over seeds. lib/worlds.py describes the simulation and its
limits; lib/selection_rules.py lists the rules. A replayed log has no feedback: it shows how well rates are predicted
and how many groups are mixed, but not what would have been learned.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

import numpy as np
from scipy import special, stats

from tests.bench.lib import selection_rules, smoke, worlds

CHECKS = 20  # comparisons of the predictions with the world
# measure → title of its column: outcomes, and the quality of predictions.
OUTCOME = {
  'used': 'mixed and used ÷ generated',
  'held_out': 'held-out',
  'to_target': 'krollouts to target',
  'static': 's to target, batch waits for its longest',
  'refilled': 's to target, slots refilled',
}
PREDICTION = {
  'rank_all': 'Spearman, all',
  'rank_chosen': 'Spearman, chosen',
  'rank_stale': 'Spearman, not seen for an epoch',
  'calibration': 'calibration error',
  'interval': 'in 90 % interval',
  'brier': 'Brier of mixed',
  'visited': 'visited',
  'gini': 'Gini of visits',
  'host_ms': 'host ms a step',
}
# On the log itself, group by group in its order, independent of the rule's selection.
LOGGED = {
  'log_rank': 'Spearman of rates',
  'log_calibration': 'calibration error',
  'log_brier': 'Brier of mixed',
  'log_constant': "Brier of the log's own share of mixed",
}
GROUPS = (OUTCOME, PREDICTION, LOGGED)
MEASURES = OUTCOME | PREDICTION | LOGGED
SECONDS_PER_TOKEN = 1e-3  # of one iteration of decoding; scales both columns of seconds


class Meter:
  """Counts generated groups and rollouts, and compares predictions with the world."""

  def __init__(self, world):
    self.world, N = world, len(world.difficulty_N)
    self.visits_N, self.last_N = np.zeros(N, int), np.full(N, -1)
    self.generated = self.used = self.rollouts = 0
    self.static = self.refilled = self.host = 0.0
    self.to_target = self.at_target = None
    self.brier: list[float] = []
    self.checks: list[dict[str, float]] = []

  def on_generate(self, step, index, k, n, tokens_R, expected) -> None:
    """Record one call of generation with as many slots as rows; refilled slots are never idle."""
    mixed = (k > 0) & (k < n)
    self.brier.append(float(np.mean((expected - mixed) ** 2)))
    self.visits_N[index] += 1
    self.last_N[index] = step
    self.generated += len(index)
    self.rollouts += len(tokens_R)
    self.static += SECONDS_PER_TOKEN * (tokens_R.max() + worlds.FIXED_TOKENS)
    self.refilled += SECONDS_PER_TOKEN * (tokens_R.mean() + worlds.FIXED_TOKENS)

  def on_update(self) -> None:
    """Record the cost when an update first reaches the target."""
    if self.to_target is None and self.world.held_out() >= self.world.target:
      self.to_target, self.at_target = self.rollouts / 1e3, (self.static, self.refilled)

  def check(self, rule, step: int, chosen: np.ndarray) -> None:
    """Compare predicted rates with the current rates of graded rollouts."""
    N = len(self.visits_N)
    rate_N = self.world.graded()
    mean_N, variance_N, _ = rule.predict(np.arange(N))
    stale = np.flatnonzero(self.last_N < step - N / self.world.prompts)
    with np.errstate(invalid='ignore'):
      total_N = mean_N * (1 - mean_N) / variance_N - 1
      below_N = special.betainc(mean_N * total_N, (1 - mean_N) * total_N, rate_N)
    inside = np.mean((below_N > 0.05) & (below_N < 0.95)) if np.isfinite(below_N).all() else np.nan
    self.checks.append(
      dict(
        rank_all=_spearman(mean_N, rate_N),
        rank_chosen=_spearman(mean_N[chosen], rate_N[chosen]),
        rank_stale=_spearman(mean_N[stale], rate_N[stale]),
        calibration=_calibration(mean_N, rate_N),
        interval=inside,
      )
    )

  def result(self, steps: int) -> dict[str, float]:
    """All measures; NaN where the target was not reached."""
    static, refilled = self.at_target or (np.nan, np.nan)
    return dict(
      used=self.used / self.generated,
      held_out=self.world.held_out(),
      to_target=np.nan if self.to_target is None else self.to_target,
      static=static,
      refilled=refilled,
      visited=(self.visits_N > 0).mean(),
      gini=_gini(self.visits_N),
      brier=np.mean(self.brier),
      host_ms=1e3 * self.host / steps,
    ) | {name: _mean([check[name] for check in self.checks]) for name in self.checks[0]}


def run(world, rule: str, seed: int) -> dict[str, float]:
  """One run, with all rollouts that a new world allows."""
  random = np.random.default_rng((seed, 1))
  kind, settings = selection_rules.RULES[rule]
  selector, meter = kind(world, seed, **settings), Meter(world)
  waiting: deque = deque()  # sampled, but not yet observed nor used in an update
  step, checked = 0, 0
  while meter.rollouts < world.rollouts:
    calls, outside = [], 0.0

    def generate(index, n=None, step=step, calls=calls):
      nonlocal outside
      began = time.perf_counter()
      n = np.full(len(index), world.group) if n is None else n
      k, tokens_R = world.sample(index, n, random)
      meter.on_generate(step, index, k, n, tokens_R, selector.predict(index)[2])
      calls.append((index, k, n))
      outside += time.perf_counter() - began
      return k

    began = time.perf_counter()
    index, k, n = selector.step(step, generate)
    meter.host += time.perf_counter() - began - outside
    meter.used += int(((k > 0) & (k < n)).sum())
    waiting.append((calls, index, k, n, world.truth(index)))
    if meter.rollouts * CHECKS >= (checked + 1) * world.rollouts:
      meter.check(selector, step, calls[-1][0])
      checked += 1
    if len(waiting) > world.staleness:
      calls, *batch = waiting.popleft()
      began = time.perf_counter()
      selector.observe(*_merge(calls))
      meter.host += time.perf_counter() - began
      world.learn(*batch, meter.rollouts / world.rollouts, random)
      meter.on_update()
    step += 1
  return meter.result(step)


def replay(log: tuple, rule: str, seed: int) -> dict[str, float]:
  """Both uses of a log: the rule selects from its rates, and predicts its groups."""
  return run(worlds.Logged(*log), rule, seed) | predict_log(worlds.Logged(*log), rule, seed)


def predict_log(log: worlds.Logged, rule: str, seed: int) -> dict[str, float]:
  """The rule predicts the groups of each step of the log before it observes them."""
  kind, settings = selection_rules.RULES[rule]
  selector, rows = kind(log, seed, **settings), []
  for right_N in log.right_NxT.T:
    index = np.flatnonzero(right_N >= 0)
    mean, _, mixed = selector.predict(index)
    rows.append(np.stack([mean, mixed, right_N[index] / log.group], axis=1))
    selector.observe(index, right_N[index], np.full(len(index), log.group))
  mean, mixed, rate = np.concatenate(rows).T
  was = (rate > 0) & (rate < 1)
  return dict(
    log_rank=_spearman(mean, rate),
    log_calibration=_calibration(mean, rate),
    log_brier=((mixed - was) ** 2).mean(),
    log_constant=was.mean() * (1 - was.mean()),
  )


def _merge(calls: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Merge the calls of a step into distinct prompts with k of n: a prompt may be drawn twice."""
  index, k, n = (np.concatenate(x) for x in zip(*calls, strict=True))
  index, where = np.unique(index, return_inverse=True)
  return index, np.bincount(where, k).astype(int), np.bincount(where, n).astype(int)


def _calibration(mean: np.ndarray, rate: np.ndarray) -> float:
  """Σ over ten bins of the prediction: share · |mean prediction − mean rate|."""
  bins = np.minimum((mean * 10).astype(int), 9)
  return float(np.abs(np.bincount(bins, mean, 10) - np.bincount(bins, rate, 10)).sum() / len(mean))


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
  if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
    return np.nan
  return float(np.corrcoef(stats.rankdata(a), stats.rankdata(b))[0, 1])


def _gini(count_N: np.ndarray) -> float:
  """Σ_ij |x_i − x_j| / (2 N Σ x)."""
  x = np.sort(count_N)
  N = len(x)
  return float(((2 * np.arange(1, N + 1) - N - 1) * x).sum() / (N * x.sum()))


def _mean(values) -> float:
  values = np.asarray(values, float)
  return float(values[~np.isnan(values)].mean()) if (~np.isnan(values)).any() else np.nan


def paired(own: np.ndarray, base: np.ndarray) -> str:
  """Mean difference and half the width of its 95 % interval over seeds in which both are numbers."""
  difference = (own - base)[~np.isnan(own - base)]
  if len(difference) < 2:
    return '–'
  half = special.stdtrit(len(difference) - 1, 0.975) * difference.std(ddof=1)
  return f'{difference.mean():+.3g} ± {half / len(difference) ** 0.5:.2g}'


def cell(values: np.ndarray) -> str:
  """Mean ± standard deviation, and how many seeds have none."""
  missing = int(np.isnan(values).sum())
  if missing == len(values):
    return '–'
  text = f'{_mean(values):.3g}'
  if len(values) - missing > 1:
    text += f' ± {np.nanstd(values, ddof=1):.1g}'
  return text + (f' ({missing} miss)' if missing else '')


def table(results: dict[str, list[dict]], measures: list[str]) -> str:
  """A Markdown row per rule: mean ± deviation over seeds, then paired differences to uniform."""
  column = lambda rule, m: np.array([r.get(m, np.nan) for r in results[rule]], float)  # noqa: E731
  measures = [m for m in measures if not all(np.isnan(column(r, m)).all() for r in results)]
  if not measures:
    return ''
  against = [m for m in measures if m in OUTCOME] if 'uniform' in results else []
  head = ['', *(MEASURES[m] for m in measures), *(f'Δ {MEASURES[m]}' for m in against)]
  lines = ['| ' + ' | '.join(head) + ' |', '|---' * len(head) + '|']
  for rule in results:
    cells = [cell(column(rule, m)) for m in measures]
    cells += [
      '' if rule == 'uniform' else paired(column(rule, m), column('uniform', m)) for m in against
    ]
    lines.append('| ' + ' | '.join([rule, *cells]) + ' |')
  return '\n'.join(lines) + '\n'


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = lambda text: text.split(',')  # noqa: E731
  parser.add_argument('--seeds', type=int, default=5)
  parser.add_argument('--first-seed', type=int, default=0)
  parser.add_argument('--worlds', type=names, default=['medium', 'hard', *worlds.FIXED])
  # Names of rules contain commas.
  parser.add_argument(
    '--rules', type=lambda text: text.split(';'), default=list(selection_rules.MAIN)
  )
  parser.add_argument('--measures', type=names, default=list(MEASURES))
  parser.add_argument('--replay', metavar='RUN_FOLDER', default='')
  args = smoke.parse(parser, seeds=2, worlds=['hard'], rules=['uniform', 'default'])
  for kind, known in (('rules', selection_rules.RULES), ('measures', MEASURES)):
    if unknown := set(getattr(args, kind)) - set(known):
      raise SystemExit(f'--{kind}: {"; ".join(unknown)} unknown; there are {"; ".join(known)}.')
  return args


def main() -> None:
  args = arguments()
  seeds = range(args.first_seed, args.first_seed + args.seeds)
  if args.replay:
    log = worlds.read_log(args.replay)
    measured = {args.replay: lambda rule, seed: replay(log, rule, seed)}
  else:
    measured = {
      name: lambda rule, seed, name=name: run(worlds.make(name, seed), rule, seed)
      for name in args.worlds
    }
  for name, measure in measured.items():
    results = {}
    for rule in args.rules:
      results[rule] = [measure(rule, seed) for seed in seeds]
      print(f'{name}: {rule}', file=sys.stderr)
    print(f'\n### {name}\n')
    for group in GROUPS:
      print(table(results, [m for m in args.measures if m in group]), flush=True)


if __name__ == '__main__':
  main()
