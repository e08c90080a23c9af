"""Learning curves of methods on the tiny job: same start, same number of rollouts, several seeds each.

python -m tests.bench.curves --out=runs/curves [--methods grpo,dapo] [--seeds 0,1,2,3,4] [--plot curves.svg] [--smoke]
Every method is the objective of its file in configs/, on the model and optimizer of configs/tiny.py with strings of up
to 5 digits, 32 prompts × 8 rollouts × 60 steps and 4 optimizer steps per batch, so that ratios and trust regions
matter. (With the job's strings of up to 8 digits and a learning rate of 3e-4, minibatches of 64 rows unlearn.) All
runs of a seed share one warm start. Finished runs are not repeated; the table shows all runs in --out.
"""

from __future__ import annotations

import argparse
import json
import os

import jax
import numpy as np

from jaxrl_llm import train
from jaxrl_llm.config import loading as configs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import sft
from tests.bench.lib import smoke

ROOT = os.path.join(os.path.dirname(__file__), '..', '..')
METHODS = (
  'grpo', 'dapo', 'dr_grpo', 'gspo', 'cispo', 'scale_rl', 'rloo', 'reinforce_pp', 'm2po', 'sapo', 'max_rl',
)  # fmt: skip
EASY = ('completion_tokens=7', 'sft.steps=80')
TASKS = tuple(dict(name=name, min_length=1, max_length=5) for name in ('rev', 'sort'))
JOB = (
  *EASY,
  'prompts=32',
  'learner.minibatches=4',
  'optimizer.learning_rate=1e-4',
  'monitoring.rollouts_every=1000',
)
STEPS = 60
SMOOTH = 5  # steps in a point of the plot


def job(method: str, seed: int, steps: int = STEPS, more: tuple[str, ...] = ()):
  """The tiny job with the objective of another file, and with the overrides `more`."""
  ends = (
    f'seed={seed}',
    f'steps={steps}',
    f'evaluation.every={steps // 2}',
    f'checkpoint.every={steps}',
  )
  config = configs.load(f'{ROOT}/configs/tiny.py', [f'--config.{x}' for x in (*JOB, *ends, *more)])
  config.objective = configs.load(method).objective
  config.data.tasks = TASKS
  # No length penalty: the answers of this task are short.
  config.objective.reward_shaping = dict(fn='none')
  return config


def share_warm_starts() -> None:
  """Run the warm start once per seed: it does not depend on the method."""
  original, params_of_seed = sft.run, {}

  def run(config, spec, state, *rest):
    if config.seed not in params_of_seed:
      warm = original(config, spec, state, *rest)
      params_of_seed[config.seed] = jax.tree.map(np.asarray, warm.params)
    return train_state.init_state(spec, params_of_seed[config.seed])

  sft.run = run


def final(folder: str, steps: int) -> dict[str, float] | None:
  path = os.path.join(folder, 'eval', f'step_{steps:06d}.json')
  if not os.path.isfile(path):
    return None
  with open(path) as file:
    return json.load(file)['metrics']


def rewards(folder: str) -> np.ndarray:
  with open(os.path.join(folder, 'metrics.jsonl')) as file:
    return np.array([json.loads(line)['critic/score/mean'] for line in file])


def table(out: str, steps: int) -> dict[str, list[str]]:
  """Print means over seeds; returns the folders of each method."""
  names = sorted(d for d in os.listdir(out) if final(os.path.join(out, d), steps) is not None)
  found = {m: [os.path.join(out, d) for d in names if d.rpartition('_')[0] == m] for m in METHODS}
  found = {m: folders for m, folders in found.items() if folders}
  print(f'{"":14} seeds  greedy       mean@4       best@4       reward of the last 10 steps')
  for method, folders in found.items():
    metrics = [final(f, steps) for f in folders]
    cells = []
    for kind in ('greedy', 'mean@4', 'best@4'):
      x = 100 * np.array([t[f'val-core/all/acc/{kind}'] for t in metrics])
      cells.append(f'{x.mean():5.1f} ± {x.std(ddof=len(x) > 1):4.1f}')
    last = np.mean([rewards(f)[-10:].mean() for f in folders])
    print(f'{method:14} {len(folders):5}  {" ".join(cells)}  {last:.3f}')
  return found


def draw(found: dict[str, list[str]], path: str) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(8, 5), layout='constrained')
  for index, (method, folders) in enumerate(found.items()):
    runs = np.array([rewards(f) for f in folders])
    runs = runs[:, : runs.shape[1] // SMOOTH * SMOOTH]
    points = runs.reshape(len(folders), -1, SMOOTH).mean(2)
    x = SMOOTH * (np.arange(points.shape[1]) + 0.5)
    style = '-' if index < 10 else '--'
    (line,) = axes.plot(x, points.mean(0), style, label=method)
    half = points.std(0) / np.sqrt(len(folders))
    axes.fill_between(
      x, points.mean(0) - half, points.mean(0) + half, color=line.get_color(), alpha=0.15, lw=0
    )
  axes.set(xlabel='step', ylabel='reward of the training rollouts, mean of seeds ± standard error')
  axes.legend(frameon=False, ncols=2)
  axes.grid(alpha=0.3)
  figure.savefig(path)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default='runs/curves')
  parser.add_argument('--methods', default=','.join(METHODS))
  parser.add_argument('--seeds', default='0,1,2,3,4')
  parser.add_argument('--plot', default='')
  parser.add_argument('--steps', type=int, default=STEPS)
  options = smoke.parse(parser, methods='grpo,dapo', seeds='0', steps=6)
  share_warm_starts()
  os.makedirs(options.out, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', os.path.join(options.out, 'compiled'))
  for seed, method in (
    (s, m) for s in options.seeds.split(',') for m in options.methods.split(',')
  ):
    folder = os.path.join(options.out, f'{method}_{seed}')
    if seed and final(folder, options.steps) is None:
      more = smoke.TINY if options.smoke else ()
      train.run(job(method, int(seed), options.steps, more), folder)
  found = table(options.out, options.steps)
  if options.plot:
    draw(found, options.plot)


if __name__ == '__main__':
  main()
