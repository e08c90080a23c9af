"""A synthetic run directory for tests and benchmarks of the report: `make(root, …)` writes the same files each time."""

from __future__ import annotations

import json
import os

import numpy as np

from jaxrl_llm.config import loading as configs
from jaxrl_llm.monitoring import alarms

# Markup that a page must escape.
EVIL = '</script><img src=x onerror="document.title=1"><!--SCRIPT-->&lt;'
WORDS = 'so we add the two numbers first then carry one and write down what is left of it'.split()


def make(root, steps=6, prompts=2, rollouts=4, *, seed=0, tokens=8192, pool=40, words=12) -> str:
  """Write the directory and return its path.

  `pool` is the number of prompts, `words` the typical length of a completion, `tokens` the number of tokens of a step
  with per-token values.
  """
  random, root = np.random.default_rng(seed), str(root)
  for name in ('rollouts', 'eval'):
    os.makedirs(os.path.join(root, name), exist_ok=True)
  config = configs.default()
  config.steps, config.prompts, config.rollouts, config.seed = steps, prompts, rollouts, seed
  _json(root, 'config.json', json.loads(config.to_json()))
  start = dict(time='2026-01-01T00:00:00Z', devices=['TFRT_CPU_0'], git='0' * 40)
  _json(root, 'environment.json', [start])
  metrics, choices = [], []
  for step in range(steps):
    skill = 0.15 + 0.7 * step / max(steps - 1, 1)
    chosen = random.choice(pool, prompts, replace=False).tolist()
    rows = [
      _rollout(random, step, prompt, skill, words) for prompt in chosen for _ in range(rollouts)
    ]
    _bound(rows, tokens)
    _lines(root, f'rollouts/step_{step:06d}.jsonl', rows)
    metrics.append(_metrics(random, step, skill, rows))
    choices.append(_choice(random, step, chosen, skill))
  _lines(root, 'metrics.jsonl', metrics)
  _lines(root, 'choices.jsonl', choices)
  for step, right in ((0, 0.2), (steps, 0.7)):
    _json(root, f'eval/step_{step:06d}.json', _evaluation(step, right))
  _json(root, 'curriculum.json', _curriculum(random, steps))
  return root


def _evaluation(step, right) -> dict:
  means = {'mean@4': right - 0.05, 'greedy': right, 'best@4': right + 0.1, 'pass@4': right + 0.1}
  measures = {k: dict(mean=v, low=v - 0.06, high=v + 0.07) for k, v in means.items()}
  group = dict(source='all', level='', prompts=200, measures=measures, curves={})
  metrics = {f'val-core/all/acc/{name}': value for name, value in means.items()}
  return dict(step=step, metrics=metrics, groups=[group], rows=[])


def _rollout(random, step, prompt, skill, words) -> dict:
  chosen_words = random.choice(WORDS, random.integers(2, 2 * words)).tolist()
  right = int(random.random() < skill)
  pieces = (
    [EVIL] * (prompt == 7)
    + [word + ' ' for word in chosen_words]
    + [str(prompt + 1 if right else prompt)]
  )
  row = dict(
    input=f'What is {prompt} + 1? Think it over & answer.',
    output=''.join(pieces),
    gts=str(prompt + 1),
    score=float(right),
    step=step,
    prompt=prompt,
    length=len(pieces),
    reason='length' if len(pieces) > 1.8 * words else 'stop',
    right=right,
    prompt_text=f'<|user|>What is {prompt} + 1? Think it over & answer.<|assistant|>',
    rewards=dict(exact=float(right), brevity=0.0),
    shaped=right - 0.25,
  )
  logp = (-random.exponential(0.8, len(pieces))).round(3).tolist()
  advantage = 1.0 if right else -0.5
  spread = (np.linspace(0.5, 1, len(pieces)) * advantage / 64).round(5).tolist()
  return row | dict(
    logp=logp, advantage=advantage, coefficient=spread, cuts=[len(p) for p in pieces]
  )


def _bound(rows, tokens) -> None:
  for row in rows:
    tokens -= row['length']
    if tokens < 0:
      for name in ('logp', 'advantage', 'coefficient', 'cuts'):
        del row[name]


def _metrics(random, step, skill, rows) -> dict:
  scores, lengths = [r['score'] for r in rows], [r['length'] for r in rows]
  cut = [r['reason'] == 'length' for r in rows]
  entropy = 1.2 * (1 - skill) + 0.03 * random.random()
  row = {
    'training/global_step': step,
    'actor/entropy': entropy,
    'actor/grad_norm': 1 + random.random(),
    'actor/update_norm': 1e-3,
    'actor/lr': 1e-5,
    'actor/skipped_updates': 0.0,
    'actor/pg_clipfrac': 0.01 * random.random(),
    'actor/ppo_kl': 1e-4 * random.random(),
    'critic/score/mean': float(np.mean(scores)),
    'critic/score/min': 0.0,
    'critic/score/max': 1.0,
    'curriculum/observed_success': float(np.mean(scores)),
    'curriculum/mixed_share': 0.6,
    'curriculum/calibration_error': 0.1 * random.random(),
    'frac_reward_zero_std': 0.4,
    'perf/rollouts': len(rows),
    'perf/throughput': 900 + 200 * random.random(),
    'response_length/mean': float(np.mean(lengths)),
    'response_length/clip_ratio': float(np.mean(cut)),
    'timing_s/gen_update': 2 + random.random(),
    'timing_s/grade': 0.3 * random.random(),
    'training/rollout_probs_diff_mean': 1e-7,
    'training/rollout_probs_diff_max': 2e-6,
    'training/trained_tokens': float(sum(lengths)),
  }
  row['timing_s/step'] = row['timing_s/gen_update'] + row['timing_s/grade'] + 0.1
  return row | {f'health/{name}': 0.0 for name in alarms.NAMES}


def _choice(random, step, chosen, skill) -> dict:
  n = len(chosen)
  worth = random.random(n).round(3).tolist()
  why = ['audit' if random.random() < 0.1 else 'picked' for _ in chosen]
  return {
    'training/global_step': step,
    'prompt': chosen,
    'why': why,
    'worth': [None if w == 'audit' else x for w, x in zip(why, worth, strict=True)],
    'mean_worth': 0.4,
    'success': np.clip(random.normal(skill, 0.15, n), 0, 1).round(3).tolist(),
    'mixed': random.random(n).round(3).tolist(),
    'visits': [step] * n,
    'continued': [],
    'asked': [],
  }


def _curriculum(random, steps) -> dict:
  share = lambda: (lambda x: (x / x.sum()).round(4).tolist())(random.random(12))  # noqa: E731
  entry = dict(prompt=3, question='What is 3 + 1?', answer='4', source='sum')
  entry |= dict(success=0.5, mixed=0.99, visits=4)
  return dict(
    windows=[[0, steps // 2], [steps // 2 + 1, steps - 1]],
    difficulty_WxD=[share(), share()],
    prior_D=share(),
    reliability=[[0.15, 0.2, 40], [0.45, 0.5, 200], [0.85, 0.8, 90]],
    error=0.05,
    brier=0.2,
    most=[entry],
    least=[entry | dict(prompt=9, mixed=0.01, success=0.99)],
    suspects=[],
  )


def _json(root, name, value) -> None:
  with open(os.path.join(root, name), 'w') as file:
    json.dump(value, file)


def _lines(root, name, rows) -> None:
  with open(os.path.join(root, name), 'w') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)
