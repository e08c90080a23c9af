"""Health in words: what the run's own alarms (jaxrl_llm/monitoring/alarms.py) said, when, and what to do about it."""

from __future__ import annotations

import re
from typing import Any

import ml_collections

from jaxrl_llm.checkpointing.metrics_log import STEP
from jaxrl_llm.learner import precision
from jaxrl_llm.monitoring import alarms

# alarm → (what it watches, {metric: a sentence with its `last`, `least` and `most` value and the step `at` of the most,
# or with the alarm's `bounds`}). A sentence states numbers and judges nothing, so that it holds at any value.
_GRADIENT = 'The norm of the gradient is {last:.3g} now, {least:.3g} to {most:.3g} so far.'
_RIGHT = '{last:.1%} of the completions are right now, {least:.1%} to {most:.1%} so far.'
_CHECKS = dict(
  probs_gap=(
    'Log-prob agreement of sampler and trainer',
    {
      'training/rollout_probs_diff_mean': 'The mean gap in probability is {last:.1e} now, at most {most:.1e} (step '
      '{at}); the alarm is above {bounds.probs_gap:g}.',
      'training/rollout_probs_diff_max': 'The largest gap of one token is {most:.1e} (step {at}).',
    },
  ),
  non_finite=(
    'Finite loss and gradient',
    {
      'actor/skipped_updates': '{last:g} updates in a row were skipped now, {most:g} at most.',
      'actor/grad_norm': _GRADIENT,
    },
  ),
  truncated=(
    'Truncated answers',
    {
      'response_length/clip_ratio': '{last:.1%} of the completions are cut off at config.completion_tokens now, '
      '{most:.1%} at most (step {at}); the alarm is above {bounds.truncated:.0%}.'
    },
  ),
  entropy=(
    'Entropy',
    {
      'actor/entropy': '{last:.3g} nats a token now, at least {least:.3g}; the alarm is below {bounds.entropy:g}.'
    },
  ),
  still=(
    'Size of the updates',
    {
      'actor/grad_norm': _GRADIENT,
      'actor/update_norm': 'The last update moved the weights by {last:.3g}, none by more than {most:.3g}.',
    },
  ),
  grading=(
    'Grading',
    {
      'grade/failed_share': '{last:.1%} of the completions could not be graded now, {most:.1%} at most (step {at}); '
      'the alarm is above {bounds.failed:.0%}.'
    },
  ),
  all_wrong=('Right answers', {'curriculum/observed_success': _RIGHT}),
  all_right=('Wrong answers', {'curriculum/observed_success': _RIGHT}),
  same_reward=(
    'Spread of the rewards',
    {
      'critic/score/min': 'The lowest reward is {last:g} now',
      'critic/score/max': 'and the highest {last:g}.',
    },
  ),
  format=(
    'Format of the replies',
    {'grade/unread': '{last:.0%} of the first batch hold nothing that config.rewards.fn reads.'},
  ),
  unrewarded=(
    'Rewards of the first batch',
    {'grade/unrewarded': '{last:.0%} of the first batch got no reward at all.'},
  ),
  prompt_paid=(
    'Rewards for the prompt itself',
    {'grade/prompts_paid': '{last:.0%} of the prompts, graded as if they were replies, are paid.'},
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


def _of_alarm(name: str, rows: list[dict], bounds: alarms.Bounds | None) -> dict:
  title, sentences = _CHECKS[name]
  flags = [(row[STEP], bool(row[f'health/{name}']), row) for row in rows if f'health/{name}' in row]
  bad = [(step, row) for step, flag, row in flags if flag]
  told = dict(title=title, steps=[], values=_values(rows, tuple(sentences)))
  if not flags:
    return told | dict(state='unknown', words='Not recorded by this run.')
  if not bad:
    return told | dict(state='well', words=_words(sentences, told['values'], bounds))
  words = alarms.advice(name, bad[-1][1], bounds) if bounds else 'The alarm went off.'
  state = 'now' if flags[-1][1] else 'past'
  return told | dict(state=state, words=words, steps=_stretches([step for step, _ in bad]))


def _words(sentences: dict[str, str], values: list[dict], bounds: alarms.Bounds | None) -> str:
  """The sentences on the values that there are; without bounds, what names one ends before it."""
  found = []
  for value in values:
    sentence = sentences[value['name']]
    if bounds is None:
      sentence = re.sub(r'; the\s+alarm is .*', '.', sentence)
    found.append(sentence.format(**value, bounds=bounds))
  return ' '.join(found) or 'The run recorded no number of it.'


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


def _bounds(config: dict[str, Any], on_cpu: bool) -> alarms.Bounds | None:
  try:
    laid = ml_collections.ConfigDict(config)
    return alarms.bounds(laid, precision.compute(laid, on_cpu))
  except (AttributeError, KeyError, TypeError, ValueError):  # of a version that had other fields
    return None
