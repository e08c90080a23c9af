"""Health in words: what the run's own alarms (jaxrl_llm/health.py) said, when, and what to do about it."""

from __future__ import annotations

from typing import Any

import ml_collections

from jaxrl_llm import health, precision
from jaxrl_llm.metrics import NONFINITE, STEP

# alarm → (what it watches, the metrics to look at, what is well).
_CHECKS = dict(
  probs_gap=(
    'Log-prob agreement of sampler and trainer',
    ('training/rollout_probs_diff_mean', 'training/rollout_probs_diff_max'),
    'What was sampled is what learns.',
  ),
  non_finite=(
    'Finite loss and gradient',
    ('actor/skipped_updates', NONFINITE, 'actor/grad_norm'),
    'No update was skipped.',
  ),
  truncated=('Truncated answers', ('response_length/clip_ratio',), 'Few answers are cut off.'),
  entropy=('Entropy', ('actor/entropy',), 'The policy still varies.'),
  still=('Size of the updates', ('actor/grad_norm', 'actor/update_norm'), 'The weights move.'),
  grading=('Grading', ('grade/failed_share',), 'Few answers could not be graded.'),
  all_wrong=('Right answers', ('curriculum/observed_success',), 'There are some.'),
  all_right=('Wrong answers', ('curriculum/observed_success',), 'There are some.'),
  same_reward=(
    'Spread of the rewards',
    ('critic/score/min', 'critic/score/max'),
    'Rewards differ.',
  ),
  format=(
    'Format of the replies',
    ('grade/unread',),
    'The first batch had what the grader reads.',
  ),
  unrewarded=('Rewards of the first batch', ('grade/unrewarded',), 'Some reply of it was paid.'),
  prompt_paid=(
    'Rewards for the prompt itself',
    ('grade/prompts_paid',),
    'Repeating the prompt pays nothing.',
  ),
)
# Told, and judged by no alarm.
_SHOWN = (
  (
    'Clip fractions',
    ('actor/pg_clipfrac', 'actor/rejected_frac'),
    'Share of the tokens whose update the trust region or the correction took away. No alarm watches it: 0 is usual '
    'with one update a batch, and a share that grows says that the policy leaves the one that sampled.',
  ),
)


def verdicts(rows: list[dict[str, Any]], config: dict[str, Any], on_cpu: bool) -> list[dict]:
  """One dict a check: title, state (now, past, well, unknown, told), words, and its metrics' last and worst values.

  Alarms are those that the run recorded as health/<name> when it saw them; nothing is judged anew here. Source: none.
  """
  bounds = _bounds(config, on_cpu)
  told = [_of_alarm(name, rows, bounds) for name in _CHECKS]
  told.insert(
    2,
    *(
      dict(title=title, state='told', words=words, steps=[], values=_values(rows, names))
      for title, names, words in _SHOWN
    ),
  )
  # What is wrong now comes first; else the order above.
  return sorted(told, key=lambda one: ('now', 'past').index(one['state']) if one['steps'] else 2)


def overall(told: list[dict]) -> str:
  """A sentence on all of them. Source: none."""
  now = [one['title'] for one in told if one['state'] == 'now']
  past = [one['title'] for one in told if one['state'] == 'past']
  well = sum(one['state'] == 'well' for one in told)
  if not well and not now and not past:
    return 'Not known: no step has recorded its health.'
  if now:
    return f'Needs attention: {len(now)} of {well + len(now) + len(past)} checks fail now.'
  if past:
    return f'Well now: {len(past)} of {well + len(past)} checks failed earlier.'
  return f'Well: none of {well} checks has failed.'


def _of_alarm(name: str, rows: list[dict], bounds: health.Bounds | None) -> dict:
  title, metrics, fine = _CHECKS[name]
  flags = [(row[STEP], bool(row[f'health/{name}']), row) for row in rows if f'health/{name}' in row]
  bad = [(step, row) for step, flag, row in flags if flag]
  told = dict(title=title, steps=[], values=_values(rows, metrics))
  if not flags:
    return told | dict(state='unknown', words='Not recorded by this run.')
  if not bad:
    return told | dict(state='well', words=fine)
  words = health.advice(name, bad[-1][1], bounds) if bounds else 'The alarm went off.'
  state = 'now' if flags[-1][1] else 'past'
  return told | dict(state=state, words=words, steps=_stretches([step for step, _ in bad]))


def _stretches(steps: list[int]) -> list[list[int]]:
  """[first, last] of each run of steps that follow one another."""
  found: list[list[int]] = []
  for step in steps:
    if found and step == found[-1][1] + 1:
      found[-1][1] = step
    else:
      found.append([step, step])
  return found


def _values(rows: list[dict], names: tuple[str, ...]) -> list[dict]:
  told = []
  for name in names:
    known = [(row[STEP], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    if known:
      step, most = max(known, key=lambda one: one[1])
      least = min(value for _, value in known)
      told.append(dict(name=name, last=known[-1][1], least=least, most=most, at=step))
  return told


def _bounds(config: dict[str, Any], on_cpu: bool) -> health.Bounds | None:
  try:
    laid = ml_collections.ConfigDict(config)
    return health.bounds(laid, precision.compute(laid, on_cpu))
  except (AttributeError, KeyError, TypeError, ValueError):  # of a version that had other fields
    return None
