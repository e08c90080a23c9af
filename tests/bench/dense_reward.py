"""Rewards in [0, 0.25], which never reach the default of config.rewards.right: learning and alarms on the tiny job.

python -m tests.bench.dense_reward [--out runs/dense_reward] [--seed 0] [--smoke]
configs/tiny.py after 30 steps of its supervised start, with 32 prompts × 8 rollouts and a quarter of the share of
characters that stand where the answer has them as the reward (tests/judges.py), twice: with config.rewards.right=0.25,
and with 1.0, which no score reaches. It prints the mean reward of the first step and of the last five, the largest
share of masked rows, and the alarms. --smoke: three steps of each. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os

import jax
import numpy as np

from jaxrl_llm import train
from jaxrl_llm.config import loading as configs
from jaxrl_llm.monitoring import alarms
from tests.bench.curves import ROOT
from tests.bench.lib import smoke

JOB = (
  'prompts=32',
  'sft.steps=30',
  'optimizer.learning_rate=5e-4',
  'evaluation.every=0',
  'evaluation.prompts=32',
  'rewards.fn=tests.judges:quarter',
)
SMOKE = (
  'prompts=4',
  'sft.steps=2',
  'evaluation.prompts=0',
  'evaluation.samples=0',
  'monitoring.alarms.right_rollouts=64',
)
LAST = 5  # steps that are averaged


class RecordingHealth(alarms.Health):
  """Records the text of every alarm of a run."""

  alarms: list[str] = []

  def observe(self, row):
    metrics, new_alarms = super().observe(row)
    self.alarms.extend(alarm.text for alarm in new_alarms)
    return metrics, new_alarms


def run(folder: str, right: float, seed: int, tiny: bool) -> None:
  steps = 3 if tiny else 60
  overrides = (
    *JOB,
    *(SMOKE if tiny else ()),
    f'steps={steps}',
    f'seed={seed}',
    f'rewards.right={right}',
  )
  config = configs.load(f'{ROOT}/configs/tiny.py', [f'--config.{x}' for x in overrides])
  RecordingHealth.alarms.clear()
  train.run(config, folder)
  with open(os.path.join(folder, 'alarms.json'), 'w') as file:
    json.dump(RecordingHealth.alarms, file)


def print_result(folder: str, right: float) -> None:
  with open(os.path.join(folder, 'metrics.jsonl')) as file:
    rows = [json.loads(line) for line in file]
  with open(os.path.join(folder, 'alarms.json')) as file:
    alarms = json.load(file)
  reward = [row['critic/score/mean'] for row in rows]
  first, last = reward[0], np.mean(reward[1:][-LAST:])
  masked = max(row['frac_reward_zero_std'] for row in rows[1:])
  print(
    f'right={right}: reward {first:.4f} -> {last:.4f} ({last / first - 1:+.0%}) in {len(rows)} steps; '
    f'at most {masked:.0%} of the rows masked; {len(alarms)} alarms'
  )
  for alarm in alarms:
    print(f'  {alarm}')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default='runs/dense_reward')
  parser.add_argument('--seed', type=int, default=0)
  options = smoke.parse(parser)
  out = options.out
  os.makedirs(out, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', os.path.join(out, 'compiled'))
  alarms.Health = RecordingHealth
  for right in (0.25, 1.0):
    folder = os.path.join(out, f'right_{right}_seed_{options.seed}')
    if not os.path.exists(os.path.join(folder, 'alarms.json')):
      run(folder, right, options.seed, options.smoke)
    print_result(folder, right)


if __name__ == '__main__':
  main()
