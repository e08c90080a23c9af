"""Health checks of the report: the alarms that a run recorded (jaxrl_llm/monitoring/alarms.py), in words."""

from __future__ import annotations

import re

import ml_collections

from jaxrl_llm.checkpointing.metrics_log import STEP
from jaxrl_llm.learner import precision
from jaxrl_llm.monitoring import alarms
from jaxrl_llm.report.rollouts import JsonObject

# alarm → (title, {metric: sentence}). A sentence may use the metric's `last`, `least` and `most` value, the step `at`
# of the largest value, and the alarm's `bounds`. It states numbers without judging them, so that it holds at any value.
_GRADIENT = 'The norm of the gradient is {last:.3g} now, {least:.3g} to {most:.3g} so far.'
_CORRECT = '{last:.1%} of the completions are right now, {least:.1%} to {most:.1%} so far.'
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
    'Completions cut off at the cap',
    {
      'response_length/clip_ratio': '{last:.1%} of the completions are cut off at config.completion_tokens now, '
      '{most:.1%} at most (step {at}); the alarm is above {bounds.truncated:.0%}.'
    },
  ),
  entropy=(
    'Entropy',
    {
      'actor/entropy': '{last:.3g} nats per token now, at least {least:.3g}; the alarm is below {bounds.entropy:g}.'
    },
  ),
  still=(
    'Size of the updates',
    {
      'actor/grad_norm': _GRADIENT,
      'actor/update_norm': 'The last update moved the weights by {last:.3g}, the largest by {most:.3g}.',
    },
  ),
  grading=(
    'Grading failures',
    {
      'grade/failed_share': '{last:.1%} of the completions could not be graded now, {most:.1%} at most (step {at}); '
      'the alarm is above {bounds.failed:.0%}.'
    },
  ),
  all_wrong=('Some completions are right', {'curriculum/observed_success': _CORRECT}),
  all_right=('Some completions are wrong', {'curriculum/observed_success': _CORRECT}),
  same_reward=(
    'Spread of the rewards',
    {
      'critic/score/min': 'The lowest reward is {last:g} now',
      'critic/score/max': 'and the highest {last:g}.',
    },
  ),
  format=(
    'Answer format in the first batch',
    {
      'grade/unread': '{last:.0%} of the first batch hold no answer that config.rewards.fn can read.'
    },
  ),
  unrewarded=(
    'Rewards of the first batch',
    {'grade/unrewarded': '{last:.0%} of the first batch got no reward at all.'},
  ),
  prompt_paid=(
    'Reward for repeating the prompt',
    {
      'grade/prompts_paid': '{last:.0%} of the prompts get the full reward when graded as completions.'
    },
  ),
)
# (title, metrics, text) of numbers that are shown without an alarm, and their position among the checks.
_INFORMATION = (
  'Clip fractions',
  ('actor/pg_clipfrac', 'actor/rejected_frac'),
  'Share of the tokens whose update was removed by the trust region or by the importance correction. There is no '
  'alarm for it: 0 is usual with one update per batch, and a growing share means that the policy moves away from the '
  'one that sampled.',
)
_INFORMATION_POSITION = 2


def check_results(rows: list[JsonObject], config: JsonObject, on_cpu: bool) -> list[JsonObject]:
  """Returns one entry per check: title, state, text, steps and values; failing checks come first, then recovered ones.

  state is failing, recovered, passing, not_recorded or information. It is taken from the run's metrics health/<name>;
  no alarm is evaluated again. steps holds [first, last] of each range of failing steps. values holds the last, least
  and largest value of the check's metrics.
  """
  bounds = _bounds(config, on_cpu)
  checks = [_check_of_alarm(name, rows, bounds) for name in _CHECKS]
  title, metrics, text = _INFORMATION
  information = dict(title=title, state='information', text=text, steps=[])
  checks.insert(_INFORMATION_POSITION, information | dict(values=_values(rows, metrics)))
  order = ('failing', 'recovered')
  # The sort is stable: within a state the order above stays.
  return sorted(
    checks, key=lambda check: order.index(check['state']) if check['steps'] else len(order)
  )


def summary(checks: list[JsonObject]) -> str:
  """Returns one sentence about all checks."""
  counts = {
    state: sum(check['state'] == state for check in checks)
    for state in ('failing', 'recovered', 'passing')
  }
  total = sum(counts.values())
  if not total:
    return 'Not known: no step has recorded its health.'
  if counts['failing']:
    return f'Needs attention: {counts["failing"]} of {total} checks fail now.'
  if counts['recovered']:
    return f'Healthy now: {counts["recovered"]} of {total} checks failed earlier.'
  return f'Healthy: none of {total} checks has failed.'


def _check_of_alarm(name: str, rows: list[JsonObject], bounds: alarms.Bounds | None) -> JsonObject:
  title, sentences = _CHECKS[name]
  recorded = [
    (row[STEP], bool(row[f'health/{name}']), row) for row in rows if f'health/{name}' in row
  ]
  bad = [(step, row) for step, is_bad, row in recorded if is_bad]
  check = dict(title=title, steps=[], values=_values(rows, tuple(sentences)))
  if not recorded:
    return check | dict(state='not_recorded', text='Not recorded by this run.')
  if not bad:
    return check | dict(state='passing', text=_text(sentences, check['values'], bounds))
  text = alarms.advice(name, bad[-1][1], bounds) if bounds else 'The alarm went off.'
  state = 'failing' if recorded[-1][1] else 'recovered'
  return check | dict(state=state, text=text, steps=_ranges([step for step, _ in bad]))


def _text(sentences: dict[str, str], values: list[JsonObject], bounds: alarms.Bounds | None) -> str:
  """Fills in the sentences of the recorded metrics. Without bounds the clauses about them are cut."""
  filled = []
  for value in values:
    sentence = sentences[value['name']]
    if bounds is None:
      sentence = re.sub(r'; the\s+alarm is .*', '.', sentence)
    filled.append(sentence.format(**value, bounds=bounds))
  return ' '.join(filled) or 'The run recorded no number of it.'


def _ranges(steps: list[int]) -> list[list[int]]:
  """[first, last] of each range of consecutive steps."""
  ranges: list[list[int]] = []
  for step in steps:
    if ranges and step == ranges[-1][1] + 1:
      ranges[-1][1] = step
    else:
      ranges.append([step, step])
  return ranges


def _values(rows: list[JsonObject], metrics: tuple[str, ...]) -> list[JsonObject]:
  """name, last, least and largest value, and the step of the largest, of each metric that was recorded."""
  values = []
  for name in metrics:
    points = [(row[STEP], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    if points:
      step, most = max(points, key=lambda point: point[1])
      least = min(value for _, value in points)
      values.append(dict(name=name, last=points[-1][1], least=least, most=most, at=step))
  return values


def _bounds(settings: JsonObject, on_cpu: bool) -> alarms.Bounds | None:
  try:
    config = ml_collections.ConfigDict(settings)
    return alarms.bounds(config, precision.compute_dtype(config, on_cpu))
  except (AttributeError, KeyError, TypeError, ValueError):  # of a version with other fields
    return None
