"""A task that the model never solves by itself: what prefixes of known answers change.

python -m tests.bench.hints [--out runs/hints] [--rules none,prefix,item_response,by_difficulty] [--seeds 0,1,2]
The model of configs/tiny.py, a short supervised start on strings of 5 to 7 digits to be reversed, then 60 steps on 64 such
strings, 32 prompts × 8 rollouts a step. Told are the shares of the 64 prompts that some plain rollout solved by then, and
of 200 other strings solved without any hint, before and after. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os

import jax
import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import train
from tests.bench.curves import ROOT

STEPS = 60
JOB = (
  'prompts=32',
  f'steps={STEPS}',
  'completion_tokens=9',
  'prompt_tokens=20',
  'updates_per_rollout=2',
  'optimizer.learning_rate=2e-4',
  'optimizer.decay=constant',
  'data.size=64',
  f'eval.every={STEPS}',
  f'checkpoint.every={STEPS}',
)
RULES = {
  'none': dict(fn='none'),
  'prefix': dict(fn='prefix', start=0.75, step=0.15, plain=0.25),
  'item_response': dict(fn='item_response', plain=0.25),
  'by_difficulty': dict(fn='by_difficulty', most=0.8),
}


def job(rule: str, seed: int, sft: int):
  said = [f'--config.{x}' for x in (*JOB, f'seed={seed}', f'sft.steps={sft}')]
  config = configs.load(f'{ROOT}/configs/tiny.py', said)
  config.data.tasks = (dict(name='rev', min_length=5, max_length=7),)
  config.hint = RULES[rule]
  return config


def solved(folder: str) -> list[float]:
  """The share of the prompts that a plain rollout has solved, after each step."""
  seen, shares = set(), []
  for step in range(STEPS):
    with open(os.path.join(folder, 'rollouts', f'step_{step:06d}.jsonl')) as file:
      rows = [json.loads(line) for line in file]
    seen |= {row['prompt'] for row in rows if row['score'] and not row.get('hint')}
    shares.append(len(seen) / 64)
  return shares


def told(folder: str) -> dict:
  ends = []
  for step in (0, STEPS):
    with open(os.path.join(folder, 'eval', f'step_{step:06d}.json')) as file:
      ends.append(json.load(file)['metrics'])
  share = solved(folder)
  kinds = ('greedy', 'mean@4', 'best@4')
  held_out = {kind: [end[f'val-core/all/acc/{kind}'] for end in ends] for kind in kinds}
  return dict(solved=[share[i] for i in (0, 19, 39, STEPS - 1)], **held_out)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default='runs/hints')
  parser.add_argument('--rules', default=','.join(RULES))
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--sft', type=int, default=100, help='steps of the supervised start')
  options = parser.parse_args()
  os.makedirs(options.out, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', os.path.join(options.out, 'compiled'))
  rules, seeds = options.rules.split(','), [int(s) for s in options.seeds.split(',')]
  found: dict[str, list[dict]] = {rule: [] for rule in rules}
  for seed in seeds:
    for rule in rules:
      folder = os.path.join(options.out, f'{rule}_{seed}_{options.sft}')
      if not os.path.isfile(os.path.join(folder, 'eval', f'step_{STEPS:06d}.json')):
        train.run(job(rule, seed, options.sft), folder)
      found[rule].append(told(folder))
  print(f'{"":14} seeds  solved by 1, 20, 40, 60      greedy       mean@4       best@4')
  for rule, runs in found.items():
    share = np.mean([run['solved'] for run in runs], axis=0)
    cells = [
      ' → '.join(f'{100 * x:4.1f}' for x in np.mean([run[kind] for run in runs], axis=0))
      for kind in ('greedy', 'mean@4', 'best@4')
    ]
    line = ' '.join(f'{100 * x:5.1f}' for x in share)
    print(f'{rule:14} {len(runs):5}  {line}  {"  ".join(cells)}')


if __name__ == '__main__':
  main()
