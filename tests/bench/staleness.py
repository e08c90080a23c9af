"""Learning from rollouts of weights that are many updates old, with several off-policy corrections.

python -m tests.bench.staleness --out=runs/staleness [--methods ppo_clip,m2po] [--lags 0,4,16,64]
  [--seeds 0] [--learning_rate 2e-4] [--smoke]
The tiny job's model after its warm start; 128 updates of 32 prompts × 8 rollouts, each on rollouts sampled `lag`
updates before. One line of JSON per run: held-out accuracy before and after, the best and the last reward of the policy
that samples, entropy, and how far behavior and policy are apart. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os

import jax
import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import validation
from jaxrl_llm.evaluation import evaluate, held_out
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import host_step, setup, sft
from tests.bench.curves import EASY, ROOT, TASKS, share_warm_starts
from tests.bench.lib import smoke

UPDATES = 128
JOB = (
  *EASY,
  'prompts=32',
  'optimizer.decay=constant',
)
# PPO with a clip around the behavior policy; the others are files of configs/.
METHODS = {
  'ppo_clip': 'grpo',
  'decoupled': 'decoupled_ppo',
  'm2po': 'm2po',
  'vcpo': 'vcpo',
  'topr': 'topr',
  'minpro': 'minpro',
}


def job(method: str, seed: int, learning_rate: float, updates: int, more: tuple[str, ...] = ()):
  own = (
    f'steps={updates}',
    f'seed={seed}',
    f'optimizer.learning_rate={learning_rate}',
    'curriculum.utility.fn=uniform',
  )
  overrides = [f'--config.{x}' for x in (*JOB, *own, *more)]
  config = configs.load(f'{ROOT}/configs/tiny.py', overrides)
  config.objective = configs.load(METHODS[method]).objective
  config.data.tasks = TASKS
  return config


def run(method: str, lag: int, seed: int, learning_rate: float, updates: int, *more) -> dict:
  """One line of the study."""
  config = validation.sized(job(method, seed, learning_rate, updates, *more), jax.devices())
  context = setup.build_context(config)
  spec = context.spec
  state = train_state.init_state(spec, context.models.policy.params)
  state = sft.run(
    config, spec, state, context.tables.train, context.models.policy.tokenizer, lambda loss: None
  )
  learn = programs.compile_update(spec)
  sample = jax.jit(functools.partial(steps.generate, spec))
  waiting, rows = collections.deque(), []
  with rewards.Pool(config.rewards) as pool:
    decode, scoring = (
      context.models.policy.tokenizer.decode,
      held_out.scoring(config.rewards, pool, None),
    )
    evaluator = evaluate.make_evaluator(
      spec, context.tables.held_out, decode, scoring, 4, config.evaluation.sampling
    )
    before = evaluator(state.params)[0]
    for index in range(updates + lag):
      prompts, *more = host_step.build_inputs(context, index)
      rollout, metrics, _ = sample(state, prompts, *more)
      pending = host_step.PendingStep(index, prompts, rollout, metrics)
      landed = host_step.land(context, pool, pending)
      waiting.append(landed.batch)
      if len(waiting) > lag:
        state, device = learn(state, waiting.popleft())
        rows.append({k: float(v) for k, v in device.items()} | landed.metrics)
    after = evaluator(state.params)[0]
  reward = np.array([row['critic/score/mean'] for row in rows])
  smooth = reward.reshape(-1, 8).mean(1)
  last = rows[-8:]
  mean = lambda name: float(np.mean([row[name] for row in last]))  # noqa: E731
  return dict(
    method=method,
    lag=lag,
    seed=seed,
    learning_rate=learning_rate,
    before=before['val-core/all/acc/mean@4'],
    after=after['val-core/all/acc/mean@4'],
    greedy=after['val-core/all/acc/greedy'],
    best_reward=float(smooth.max()),
    last_reward=float(smooth[-1]),
    entropy=mean('actor/entropy'),
    drift=mean('actor/ppo_kl'),
    clipped=mean('actor/pg_clipfrac'),
    rewards=[round(float(x), 4) for x in smooth],
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default='runs/staleness')
  parser.add_argument('--methods', default=','.join(METHODS))
  parser.add_argument('--lags', default='0,4,16,64')
  parser.add_argument('--seeds', default='0')
  parser.add_argument('--learning_rate', type=float, default=2e-4)
  parser.add_argument('--updates', type=int, default=UPDATES, help='a multiple of 8')
  options = smoke.parse(parser, methods='ppo_clip', lags='0,2', updates=8)
  more = smoke.TINY if options.smoke else ()
  os.makedirs(options.out, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', os.path.join(options.out, 'compiled'))
  share_warm_starts()
  for seed in map(int, options.seeds.split(',')):
    for method in options.methods.split(','):
      for lag in map(int, options.lags.split(',')):
        path = os.path.join(options.out, f'{method}_{lag}_{seed}_{options.learning_rate:g}.json')
        if not os.path.isfile(path):
          result = run(method, lag, seed, options.learning_rate, options.updates, more)
          with open(path, 'w') as file:
            json.dump(result, file)
        with open(path) as file:
          result = json.load(file)
        cells = {k: float(f'{v:.3g}') if isinstance(v, float) else v for k, v in result.items()}
        print(json.dumps({k: v for k, v in cells.items() if k != 'rewards'}), flush=True)


if __name__ == '__main__':
  main()
