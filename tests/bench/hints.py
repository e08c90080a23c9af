"""A task that the model never solves unaided, with and without prefixes of known answers as hints.

python -m tests.bench.hints [--out runs/hints] [--rules none,prefix] [--seeds 0,1,2] [--smoke]
The model of configs/tiny.py is taught to reverse strings of 1 to 4 digits, and has then 60 steps of 32 prompts × 8
rollouts on 64 strings of 5 and 6. It prints the share of the 64 that a plain rollout has solved after some
numbers of steps, and held-out accuracy on 200 other strings of 5 and 6 digits without hints, before and after.
Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os

import jax
import numpy as np

from jaxrl_llm import data, train
from jaxrl_llm.config import loading as configs
from jaxrl_llm.runner import sft
from tests.bench.curves import ROOT
from tests.bench.lib import smoke

STEPS = 60
JOB = (
  'prompts=32',
  'completion_tokens=9',
  'prompt_tokens=20',
  'learner.minibatches=2',
  'optimizer.learning_rate=3e-4',
  'optimizer.decay=constant',
  'data.size=64',
  'sft.steps=150',
)
RULES = {
  'none': dict(fn='none'),
  'prefix': dict(fn='prefix', start=0.75, step=0.15, plain=0.25),
  'item_response': dict(fn='item_response', plain=0.25),
  'by_difficulty': dict(fn='by_difficulty', most=0.8),
}


def job(
  rule: str, seed: int, steps: int, more: tuple[str, ...] = (), digits: tuple[int, int] = (5, 6)
):
  ends = f'seed={seed}', f'steps={steps}', f'evaluation.every={steps}', f'checkpoint.every={steps}'
  overrides = [f'--config.{x}' for x in (*JOB, *ends, *more)]
  config = configs.load(f'{ROOT}/configs/tiny.py', overrides)
  config.data.tasks = (dict(name='rev', min_length=digits[0], max_length=digits[1]),)
  config.curriculum.hint = RULES[rule]
  return config


def teach_short_strings() -> None:
  """Patch the warm start to train on shorter strings than the run."""
  original = sft.run

  def run(config, spec, state, table, tokenizer, losses):
    short = job('none', config.seed, config.steps, digits=(1, 4))
    short.data.size = 1000
    table = data.load(short, tokenizer).train
    return original(config, spec, state, table, tokenizer, losses)

  sft.run = run


def solved(folder: str, steps: int) -> list[float]:
  """The share of the prompts that a plain rollout has solved, after each step."""
  solved_prompts, shares = set(), []
  for step in range(steps):
    with open(os.path.join(folder, 'rollouts', f'step_{step:06d}.jsonl')) as file:
      rows = [json.loads(line) for line in file]
    solved_prompts |= {row['prompt'] for row in rows if row['score'] and not row.get('hint')}
    shares.append(len(solved_prompts) / 64)
  return shares


def metrics_of(folder: str, steps: int) -> dict:
  ends = []
  for step in (0, steps):
    with open(os.path.join(folder, 'eval', f'step_{step:06d}.json')) as file:
      ends.append(json.load(file)['metrics'])
  share = solved(folder, steps)
  kinds = ('greedy', 'mean@4', 'best@4')
  held_out = {kind: [end[f'val-core/all/acc/{kind}'] for end in ends] for kind in kinds}
  return dict(
    solved=[share[i] for i in (0, steps // 3 - 1, 2 * steps // 3 - 1, steps - 1)], **held_out
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default='runs/hints')
  parser.add_argument('--rules', default=','.join(RULES))
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--steps', type=int, default=STEPS)
  options = smoke.parse(parser, rules='none,prefix', seeds='0', steps=3)
  more = smoke.TINY if options.smoke else ()
  teach_short_strings()
  os.makedirs(options.out, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', os.path.join(options.out, 'compiled'))
  rules, seeds = options.rules.split(','), [int(s) for s in options.seeds.split(',')]
  found: dict[str, list[dict]] = {rule: [] for rule in rules}
  for seed in seeds:
    for rule in rules:
      folder = os.path.join(options.out, f'{rule}_{seed}')
      if not os.path.isfile(os.path.join(folder, 'eval', f'step_{options.steps:06d}.json')):
        train.run(job(rule, seed, options.steps, more), folder)
      found[rule].append(metrics_of(folder, options.steps))
  print(
    f'{"":14} seeds  solved by 1, a third, two thirds, all steps     greedy       mean@4       best@4'
  )
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
