"""Prompt selection in real runs: held-out accuracy against rollouts and seconds, several seeds each.

python -m tests.bench.choices --job=tiny [--rules uniform,default] [--blind] [--out runs/choices] [--smoke]
Job `tiny` is configs/tiny.py with 20,000 strings of digits. Job `sums` is configs/dapo.py on 2,040 sums, from (2 terms,
1 digit), which SmolLM2 mostly solves, to (3, 2), which it rarely solves; held-out sums are of the same kinds. Job
`mixture` is configs/rewards/mixture.py on 20,000 rows that tests/bench/mixture_rows.py writes to --out. The supervised
starts of these two are trained once, for all seeds; without one, each run of `sums` settles on a sentence by chance,
and that decides where it ends. The rule `oracle` samples groups of --multiple times as many prompts after each
step and takes those whose rates are nearest to one half; these samples do not count, but take their time. A rule may
have variants, as in `default-half-twice`: `half` samples half as many prompts in each of as many steps, `twice` learns
each batch twice, and is compared with `uniform-twice`. With `--blind` all prompts are of one kind, as those of data
that says nothing of its rows; give it an --out of its own. Every rule starts from the same weights; runs of `sums`
and of `mixture` share samples of these. Seconds are those of the steps, with encoding and grading, without evaluation:
to measure them, pin the process to a core of an idle machine. Finished runs are not repeated, and keep no checkpoint;
the table shows all runs in --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_llm import data, train
from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.commands import export
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import validation
from jaxrl_llm.distributed import host_memory
from jaxrl_llm.types import Row
from tests.bench import mixture_rows
from tests.bench.curves import share_warm_starts
from tests.bench.lib import results, smoke
from tests.bench.lib.oracle import chosen_by_oracle

SUMS = ((2, 1, 60), (2, 2, 700), (3, 1, 500), (2, 3, 500), (3, 2, 280))
# name → (config whose curriculum and replay.collect are used, changes of that curriculum)
RULES = {
  'uniform': ('dapo', dict(utility=dict(fn='uniform'), prior_pooling=dict(fn='none'))),
  'dynamic': ('dynamic_sampling', dict(utility=dict(fn='uniform'), prior_pooling=dict(fn='none'))),
  'mopps': ('mopps', {}),
  'bots': ('bots', {}),
  'dots': ('dots', {}),
  'greso': ('greso', {}),
  'vade': ('vade', {}),
  'default': ('dapo', {}),
  'hidden_state': ('hidden_state', {}),
  'answer_odds': ('answer_odds', {}),
  'sharp': ('dapo', dict(selection=dict(fn='softmax', temperature=0.1))),
  'top': ('dapo', dict(selection=dict(fn='top'))),
  'oracle': ('dapo', {}),
}
# What may follow the name of a rule: name → overrides from the job's number of prompts.
VARIANTS = {
  'half': lambda prompts: f'prompts={prompts // 2}',
  'twice': lambda prompts: 'learner.passes=2',
}
# name → (file, steps, steps between evaluations)
JOBS = {'tiny': ('tiny', 90, 15), 'sums': ('dapo', 60, 30), 'mixture': ('mixture', 60, 15)}
# Overrides of the job of sums: answers alone.
SUMS_START = ('sft.steps=20', 'sft.learning_rate=3e-5', 'sft.prompts=16')
# Overrides of smoke runs; a model of characters needs several times as many tokens for a prompt.
SMOKE = dict.fromkeys(JOBS, smoke.TINY)
CHARACTERS = ('model=scratch', 'sft.steps=1', 'sft.prompts=2', 'completion_tokens=4')
SMOKE['sums'] += (*CHARACTERS, 'scratch.max_tokens=256', 'prompt_tokens=160')
SMOKE['mixture'] += (
  *CHARACTERS,
  'scratch.max_tokens=1024',
  'prompt_tokens=640',
  'evaluation.prompts=99',
)


def job(name: str, rule: str, seed: int, more: tuple[str, ...] = ()):
  """The job with the prompt selection of another config, and with the overrides `more`."""
  file, steps, every = JOBS[name]
  overrides = [
    f'seed={seed}',
    f'steps={steps}',
    f'evaluation.every={every}',
    f'checkpoint.every={steps}',
    *(SUMS_START if name == 'sums' else ()),
  ]
  plain = configs.load(file, [f'--config.{x}' for x in more])
  prompts = validation.sized(plain, jax.devices()).prompts
  rule, *variants = rule.split('-')
  changed = [VARIANTS[variant](prompts) for variant in variants]
  config = configs.load(file, [f'--config.{x}' for x in (*overrides, *more, *changed)])
  file, changes = RULES[rule]
  other = configs.load(file)
  config.curriculum, config.replay.collect = other.curriculum, other.replay.collect
  for stage, setting in changes.items():
    config.curriculum[stage] = setting
  if name == 'sums':
    first = dict(config.data.tasks[0])
    config.data.tasks = tuple(
      first
      | dict(size=size, min_terms=terms, max_terms=terms, min_digits=digits, max_digits=digits)
      for terms, digits, size in SUMS
    )
  return config


def one_kind(rows: Sequence[Row], tokens_N: np.ndarray | None = None) -> np.ndarray:
  """In place of `data.kinds`."""
  del tokens_N
  return np.zeros(len(rows), np.int32)


def lines(folder: str) -> list[dict]:
  with open(os.path.join(folder, 'metrics.jsonl')) as file:
    return [json.loads(line) for line in file]


def curve(name: str, folder: str, kind: str) -> np.ndarray | None:
  """Held-out accuracy at each evaluation, in percent; None for an unfinished run."""
  _, steps, every = JOBS[name]
  points = []
  for step in range(0, steps + 1, every):
    path = os.path.join(folder, 'eval', f'step_{step:06d}.json')
    if not os.path.isfile(path):
      return None
    with open(path) as file:
      points.append(100 * json.load(file)['metrics'][f'val-core/all/acc/{kind}'])
  return np.array(points)


def reached(at: np.ndarray, accuracy: np.ndarray, threshold: float) -> float:
  """Where a piecewise linear curve first reaches the threshold; inf if never."""
  for i in range(1, len(at)):
    if accuracy[i] >= threshold:
      share = (threshold - accuracy[i - 1]) / max(accuracy[i] - accuracy[i - 1], 1e-9)
      return float(at[i - 1] + max(share, 0) * (at[i] - at[i - 1]))
  return float('inf')


def spent(name: str, folder: str) -> tuple[np.ndarray, np.ndarray]:
  """Rollouts and seconds of the steps before each evaluation; the first, which compiles, counts as the median step."""
  _, steps, every = JOBS[name]
  rows = lines(folder)
  second = np.array([row['timing_s/step'] for row in rows[:steps]])
  second[0] = np.median(second)
  rollouts = np.array([row['perf/rollouts'] for row in rows[:steps]])
  return tuple(np.concatenate([[0], np.cumsum(x)])[::every] for x in (rollouts, second))


def finished(name: str, out: str) -> dict[str, dict[str, str]]:
  """Folders of the finished runs in --out: rule → seed → folder."""
  found: dict[str, dict[str, str]] = {}
  for folder in sorted(os.listdir(out)):
    rule, _, seed = folder.rpartition('_')
    path = os.path.join(out, folder)
    if rule.partition('-')[0] in RULES and curve(name, path, 'greedy') is not None:
      found.setdefault(rule, {})[seed] = path
  order = list(RULES)
  return dict(sorted(found.items(), key=lambda x: (order.index(x[0].partition('-')[0]), x[0])))


def reference(rule: str) -> str:
  """The rule that this one is compared with: uniform with as many passes."""
  return 'uniform-twice' if 'twice' in rule.split('-') else 'uniform'


def table(name: str, out: str) -> None:
  """Print means over seeds, and the rollouts and seconds to reach the final accuracy of `uniform`."""
  done = finished(name, out)
  for kind in ('greedy', 'mean@4'):
    print(
      f"\n{kind}: after each evaluation; difference to uniform at the end; rollouts and seconds to uniform's end"
    )
    for rule, runs in done.items():
      other = done.get(reference(rule), {})
      points_SxE = np.array([curve(name, f, kind) for f in runs.values()])
      mean_E = points_SxE.mean(0)
      rollouts, seconds = (
        np.mean(x, axis=0) for x in zip(*(spent(name, f) for f in runs.values()), strict=True)
      )
      both = sorted(runs.keys() & other.keys())
      ends = np.array([[curve(name, x[s], kind)[-1] for s in both] for x in (runs, other)])
      gap, end = ends[0] - ends[1], ends[1].mean() if both else float('inf')
      error = gap.std(ddof=1) / np.sqrt(len(gap)) if len(gap) > 1 else float('nan')
      at = reached(rollouts, mean_E, end), reached(seconds, mean_E, end)
      mixed = np.mean([[1 - r['frac_reward_zero_std'] for r in lines(f)] for f in runs.values()])
      points = ' '.join(f'{x:5.1f}' for x in mean_E)
      print(
        f'{rule:8} {len(runs)} seeds  {points}  {gap.mean() if len(gap) else float("nan"):+5.1f} ± {error:.1f}  '
        f'{at[0]:6.0f} of {rollouts[-1]:.0f}  {at[1]:5.0f} of {seconds[-1]:.0f} s  mixed {100 * mixed:.1f} %'
      )


def by_source(name: str, out: str) -> None:
  """Print the greedy accuracy of each source at the last evaluation, in percent: means over the runs of a rule."""
  _, steps, _ = JOBS[name]
  found: dict[str, dict[str, list[float]]] = {}
  runs = finished(name, out)
  for rule, folders in runs.items():
    for path in (os.path.join(f, 'eval', f'step_{steps:06d}.json') for f in folders.values()):
      with open(path) as file:
        metrics = json.load(file)['metrics']
      for key, value in metrics.items():
        if match := re.fullmatch('val-core/(.+)/acc/greedy', key):
          found.setdefault(match[1], {}).setdefault(rule, []).append(100 * value)
  rows = [
    [source, *(f'{np.mean(values.get(rule, np.nan)):.1f}' for rule in runs)]
    for source, values in sorted(found.items())
  ]
  print('\n' + results.table(['greedy at the end, by source', *runs], rows))


def write_mixture(folder: str, is_smoke: bool) -> tuple[str, ...]:
  """Write the rows of the mixture unless they are there; returns the overrides that read them."""
  rows, held_out = (60, 1) if is_smoke else (20_000, 20)
  mixture_rows.write(folder, mixture_rows.request(list(mixture_rows.GENERATORS), rows, held_out, 0))
  return f'data.path={folder}/rows.jsonl', f'data.eval_path={folder}/held_out.jsonl'


def drop_checkpoints(folder: str) -> None:
  """Remove the checkpoints of a finished run, of which each takes 1.6 GB with SmolLM2."""
  shutil.rmtree(os.path.join(folder, 'checkpoints'), ignore_errors=True)


def supervised_start(name: str, folder: str, more: tuple[str, ...]) -> tuple[str, ...]:
  """Train the supervised start of a job unless it is there; returns the overrides of runs from it."""
  model, run = os.path.join(folder, 'model'), os.path.join(folder, 'run')
  if not os.path.isdir(model):
    config = job(name, 'uniform', 0, (*more, 'steps=0', 'evaluation.every=0'))
    train.run(config, run)
    part = os.path.join(folder, 'part')
    shutil.rmtree(part, ignore_errors=True)
    export.export_checkpoint(config, run, part, 'float32')
    os.rename(part, model)
    drop_checkpoints(run)
  return f'model={model}', 'sft.steps=0'


def share_first_evaluation(source: str, folder: str, seed: int, model: str) -> None:
  """Give a run the samples that another run drew of the same weights; other weights are evaluated again.

  `source`: folder of the other run. `model`: the name of these weights in runs that begin with them.
  """
  source, to = (os.path.join(f, 'eval', 'step_000000.json') for f in (source, folder))
  if os.path.exists(to) or not os.path.exists(source):
    return
  with open(source) as file:
    record = json.load(file)
  record['model'] = model
  record['settings']['seed'] = seed
  os.makedirs(os.path.dirname(to), exist_ok=True)
  with safe_files.replacing(to) as part, open(part, 'x', encoding='utf-8') as file:
    json.dump(record, file)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--job', choices=list(JOBS), default='tiny')
  parser.add_argument('--out', default='runs/choices')
  parser.add_argument('--rules', default=','.join(RULES))
  parser.add_argument('--seeds', default='0,1,2,3,4')
  parser.add_argument('--multiple', type=int, default=8, help='candidates of the oracle')
  parser.add_argument('--blind', action='store_true', help='all prompts are of one kind')
  options = smoke.parse(parser, rules='uniform,default', seeds='0')
  for rule in options.rules.split(','):
    first, *variants = rule.split('-')
    if first not in RULES or not set(variants) <= set(VARIANTS):
      names = f'{", ".join(RULES)}; after them, as in default-half: {", ".join(VARIANTS)}'
      parser.error(f'--rules: {rule!r} is unknown; choose from: {names}')
  more = SMOKE[options.job] if options.smoke else ()
  if options.smoke:
    JOBS[options.job] = (JOBS[options.job][0], 2, 1)
  if options.blind:
    data.kinds = one_kind
  host_memory.keep_freed()  # as the command line does
  if options.job == 'tiny':
    share_warm_starts()
  out = os.path.join(options.out, options.job)
  os.makedirs(out, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', os.path.join(options.out, 'compiled'))
  start = os.path.abspath(os.path.join(options.out, f'{options.job}_start'))
  if options.job == 'mixture':
    more += write_mixture(os.path.abspath(os.path.join(options.out, 'mixture_rows')), options.smoke)
  if options.job != 'tiny':
    more += supervised_start(options.job, start, more)
  for seed in filter(None, options.seeds.split(',')):
    for rule in options.rules.split(','):
      folder = os.path.join(out, f'{rule}_{seed}')
      if options.job != 'tiny':
        share_first_evaluation(f'{start}/run', folder, int(seed), f'{start}/model')
      if curve(options.job, folder, 'greedy') is None:
        config = job(options.job, rule, int(seed), more)
        oracle = chosen_by_oracle(config.rewards, options.multiple)
        with oracle if rule.startswith('oracle') else contextlib.nullcontext():
          train.run(config, folder)
        drop_checkpoints(folder)
  table(options.job, out)
  if options.job == 'mixture':
    by_source(options.job, out)


if __name__ == '__main__':
  main()
