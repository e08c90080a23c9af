"""Health alarms: conditions on a run's metrics, with advice for the user.

`conditions` depends on one step's row of metrics alone. `Health` counts how long a condition holds and reports an alarm
once when it begins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.monitoring import update_metrics
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.types import JsonObject, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import Config

# The default bound on the gap between sampler and trainer where only the sampler's kernels are rounded: about four
# times the gap of SmolLM2-135M in float32, on 65 tokens of 4 completions: 1.3e-3, 1.0e-2 and 2.7e-2. A tiny random
# model
# has 2e-4, 9e-4 and 4e-3.
_ROUNDED_GAP = dict(bfloat16=1e-2, int8=4e-2, float8_e4m3fn=0.1)


class Alarm(NamedTuple):
  """An alarm that begins."""

  name: str
  text: str


class Bounds(NamedTuple):
  """The thresholds of the alarms (config.monitoring.alarms)."""

  entropy: float  # nats per token
  # mean |p of the sampler − p of the trainer|; inf where weights may differ on purpose
  probs_gap: float
  truncated: float  # share of rollouts
  failed: float  # share of rollouts
  right: float  # config.rewards.right
  low: float  # scores that count as success 0 and 1, see outcomes.bounds
  high: float


# Conditions that must hold for several steps in a row.
LASTING = ('still', 'entropy', 'all_wrong', 'all_right', 'same_reward', 'truncated')
FIRST = ('format', 'unrewarded', 'prompt_paid')  # evaluated on the first batch alone
NAMES = ('non_finite', 'probs_gap', 'grading', *FIRST, *LASTING)
ONCE = ('never_right', 'out_of_bounds')  # about the whole run; each is reported at most once

_ADVICE = dict(
  non_finite='The loss or gradient was not finite: the update was skipped. Lower config.optimizer.learning_rate or '
  'clip_norm; if it happens again on the same data, look at these rows.',
  probs_gap='training/rollout_probs_diff_mean={training/rollout_probs_diff_mean:.1e} is above {bounds.probs_gap:g}: '
  'the tokens were not sampled from the policy that is trained. This is a fault of the program or the machine, not of '
  'the task: try config.dtype=float32, config.mode=split and config.rollout at its defaults, one at a time.',
  grading='{grade/failed_share:.0%} of the rollouts could not be graded ({grade/timeouts:.0f} time-outs, '
  '{grade/crashes:.0f} crashes, {grade/errors:.0f} errors; the log has the first): correct the reward function or the '
  'rows, or raise config.rewards.deadline_s or memory_mb.',
  format='No completion of the first batch holds an answer that config.rewards.fn can read, so none can be right: '
  'request the format in config.data.system or config.data.template, or choose a reward function (or its `tag`) that '
  'reads the format of the model.',
  unrewarded='No completion of the first batch got any reward. Read the first rollout file: does config.rewards.fn '
  'compare with the right column (config.data.columns, answer_after), and in the format that the model writes?',
  prompt_paid='{grade/prompts_paid:.0%} of the prompts get the full reward when graded as completions: the reward can '
  'be had by repeating the prompt. Look for the marker that config.rewards reads in config.data.system, template and '
  'the rows, or let the reward function read the end of the completion alone.',
  still='The weights do not move: gradient {actor/grad_norm:.1e}, update {actor/update_norm:.1e}, although the '
  'learning rate is {actor/lr:.1e} and rewards differ within groups (their standard deviation is '
  '{critic/score/group_std:.1e} on average, and {frac_reward_zero_std:.0%} of the rows are masked or have equal '
  'rewards). Look at config.objective (is every token rejected, actor/rejected_frac? does the advantage need right '
  'answers, as listwise does, and is no score at config.rewards.right={bounds.right:g}?) and config.optimizer.',
  entropy='Entropy is down to {actor/entropy:.4f} nats per token '
  '(config.monitoring.alarms.entropy={bounds.entropy:g}): samples of a group are nearly the same, so '
  'that their rewards '
  'hardly differ. Go back to an earlier checkpoint with a lower config.optimizer.learning_rate, a higher '
  'config.temperature, or config.objective.trust_region.high=0.28.',
  all_wrong='No answer was right: all rewards are {critic/score/max:g}. Read a rollout file: does the model write '
  'the format that config.rewards.fn reads, and is it cut off before the answer (config.completion_tokens)? Otherwise '
  'the task is too hard: use easier rows, config.sft.steps, or config.curriculum.hint.',
  all_right='All answers were right: all rewards are {critic/score/min:g}, and nothing can be learned from them. Use '
  'harder rows, or stop here.',
  same_reward='All rewards were the same, {critic/score/min:g}: nothing is learned from them. Does config.rewards '
  'distinguish good answers from bad ones?',
  truncated='{response_length/clip_ratio:.0%} of the rollouts were cut off at config.completion_tokens: raise it, '
  'request shorter answers, or check that the model writes its end token (config.data.chat).',
  never_right='No score of {rollouts} rollouts reached config.rewards.right={bounds.right:g}: the highest is '
  '{grade/highest:g}, the lowest {grade/lowest:g}. Training continues with the rewards that differ. The curriculum '
  'treats all prompts as hard: it counts a rollout as the fraction of the way from {bounds.low:g} to {bounds.high:g} '
  'that its score reaches, {best:.0%} at best, and prefers prompts that score high. Methods that need right answers '
  'get none (config.replay.reuse, config.rewards.truncate, pruning, PRIME, DRPO), config.curriculum.hint takes every '
  'prompt for unsolved, and accuracy stays 0. If {grade/highest:g} is a right answer: '
  '--config.rewards.right={grade/highest:g}.',
  out_of_bounds='{grade/out_of_bounds:.1%} of the scores lie outside of {bounds.low:g} to {bounds.high:g}: they range '
  'from {grade/lowest:g} to {grade/highest:g}. The curriculum replaces them by the nearer bound; the update uses the '
  "rewards unchanged. If this range is intended: --config.rewards.bounds='({least:g}, {most:g})'.",
)


def conditions(row: dict[str, float], bounds: Bounds) -> dict[str, bool]:
  """Returns which alarms' conditions hold in one step. A metric that is missing raises no alarm."""
  get = lambda name, default=math.nan: float(row.get(name, default))  # noqa: E731
  same = get('critic/score/min') == get('critic/score/max')
  right = get('curriculum/observed_success') if same else math.nan
  learned = update_metrics.learned_tokens(row) > 0
  skipped = get('actor/skipped_updates', 0) > 0
  # From the update's mask and from the rewards: a wrong mask must not silence the alarm about it.
  differ = get('frac_reward_zero_std', 1) < 1 or get('critic/score/group_std', 0) > outcomes.SAME
  should_move = learned and not skipped and differ and get('actor/lr', 0) > 0
  # Metrics of the loss and the gradient. The mean over no rollouts is NaN and harmless, and update_norm is no gradient.
  watched = [
    v
    for k, v in row.items()
    if k.startswith(('actor/', 'critic/advantages/')) and k != 'actor/update_norm'
  ]
  return dict(
    non_finite=skipped or not all(map(math.isfinite, watched)),
    probs_gap=learned and get('training/rollout_probs_diff_mean', 0) > bounds.probs_gap,
    grading=get('grade/failed_share', 0) > bounds.failed,
    format=get('grade/unread') == 1,
    unrewarded=get('grade/unrewarded') == 1,
    prompt_paid=get('grade/prompts_paid') >= 0.5,
    still=should_move and 0 in (get('actor/grad_norm', 1), get('actor/update_norm', 1)),
    entropy=learned and get('actor/entropy') < bounds.entropy,
    all_wrong=right == 0,
    all_right=right == 1,
    same_reward=same and right not in (0, 1),
    truncated=get('response_length/clip_ratio') > bounds.truncated,
  )


def bounds(config: Config, dtype: str) -> Bounds:
  """Returns the bounds for a run whose trainer computes in `dtype`."""
  settings = config.monitoring.alarms
  # In float32, sampler and trainer differ by at most about 2e-6.
  usual = 1e-4 if dtype == 'float32' else 1e-2
  rounded = 0 if config.learner.quantize else _ROUNDED_GAP.get(config.rollout.weights_dtype, 0)
  gap = settings.probs_gap or max(usual, rounded)
  gap = gap if same_policy(config) else math.inf
  low, high = outcomes.bounds(config.rewards)
  return Bounds(
    entropy=settings.entropy,
    probs_gap=gap,
    truncated=settings.truncated,
    failed=settings.failed,
    right=config.rewards.right,
    low=low,
    high=high,
  )


def advice(name: str, row: dict[str, float], bounds: Bounds) -> str:
  """Returns the meaning of an alarm with the numbers of `row`, and the remedy."""
  return _ADVICE[name].format_map(_MetricFields(row, bounds))


class _Streak(NamedTuple):
  """How long a condition has held."""

  held_steps: int = 0  # consecutive steps in which the condition held
  quiet_steps: int = 0  # consecutive steps in which it did not
  reported: int = 0  # 1 from the report of the alarm until it may be reported again


class Health:
  """Counts how long each condition has held, and reports new alarms."""

  def __init__(self, config: Config, dtype: str):
    """`dtype` is that of the trainer's pass. Raises UserError for a bound out of range or an unknown name."""
    settings = config.monitoring.alarms
    _validate(settings)
    self.steps, self.stop = settings.steps, tuple(settings.stop)
    self.bounds = bounds(config, dtype)
    self._streaks = {name: _Streak() for name in NAMES}
    self._min_rollouts = settings.right_rollouts
    # Scores of the whole run.
    self._scored = dict(rollouts=0, right=False, extremes=[], reported=[])

  def observe(self, row: dict[str, float]) -> tuple[dict[str, float], list[Alarm]]:
    """Returns health/<name> metrics, 1 while an alarm lasts, and the alarms that begin with this step.

    Lasting conditions raise an alarm after `steps` steps in a row. An alarm is reported again after as many steps
    without its condition. A row without rollouts, or without an update, leaves the counts unchanged.
    """
    metrics, alarms = {}, []
    for name, bad in conditions(row, self.bounds).items():
      held_steps, quiet_steps, reported = self._streaks[name]
      if bad or self._not_measured(name, row):
        held_steps, quiet_steps = held_steps + bad, 0 if bad else quiet_steps
      else:
        held_steps, quiet_steps = 0, quiet_steps + 1
      on = held_steps >= (self.steps if name in LASTING else 1)
      if on and not reported:
        text = advice(name, row, self.bounds)
        since = f' for {self.steps} steps' if name in LASTING else ''
        alarms.append(Alarm(name, f'{name}{since}, at step {row["training/global_step"]}: {text}'))
      self._streaks[name] = _Streak(
        held_steps, quiet_steps, int(on or (reported and quiet_steps < self.steps))
      )
      metrics[f'health/{name}'] = float(on)
    return metrics, alarms + self._alarms_of_run(row)

  def _alarms_of_run(self, row: dict[str, float]) -> list[Alarm]:
    """The alarms of `ONCE` that begin with this step."""
    if 'grade/right' not in row:
      return []
    scored = self._scored
    extremes = [*scored['extremes'], row['grade/lowest'], row['grade/highest']]
    least, most = min(extremes), max(extremes)
    scored |= dict(
      rollouts=int(scored['rollouts'] + row.get('perf/rollouts', 0)),
      right=bool(scored['right'] or row['grade/right'] > 0),
      extremes=[least, most],
    )
    enough = scored['rollouts'] >= self._min_rollouts
    # Equal scores have alarms of their own: all_wrong, all_right, same_reward.
    never_right = not scored['right'] and enough and most - least > outcomes.SAME
    bad = dict(never_right=never_right, out_of_bounds=row['grade/out_of_bounds'] > 0)
    low, high = self.bounds.low, self.bounds.high
    alarms = []
    for name in (name for name in ONCE if bad[name] and name not in scored['reported']):
      values = row | {
        'grade/lowest': least,
        'grade/highest': most,
        'rollouts': scored['rollouts'],
        'least': min(least, low),
        'most': max(most, high),
        'best': min(max((most - low) / (high - low), 0.0), 1.0),
      }
      text = advice(name, values, self.bounds)
      alarms.append(Alarm(name, f'{name}, at step {row["training/global_step"]}: {text}'))
      scored['reported'] = [*scored['reported'], name]
    return alarms

  def _not_measured(self, name: str, row: dict[str, float]) -> bool:
    """Whether the row has no data on this condition: no rollouts, or no update."""
    if name in ('non_finite', 'still'):
      return not update_metrics.learned_tokens(row, default=1)
    of_rollouts = ('probs_gap', 'entropy')
    return not row.get(update_metrics.ROLLOUT_TOKENS if name in of_rollouts else 'perf/rollouts', 1)

  def check(self, alarms: list[Alarm]) -> None:
    """Raises UserError for an alarm that config.monitoring.alarms.stop names."""
    for alarm in alarms:
      if alarm.name in self.stop:
        raise UserError(f'config.monitoring.alarms.stop names {alarm.name}: {alarm.text}')

  def state_dict(self) -> JsonObject:
    """Returns the counts for the checkpoint."""
    streaks = {name: list(streak) for name, streak in self._streaks.items()}
    return streaks | dict(scored=dict(self._scored))

  def load_state_dict(self, state: JsonObject) -> None:
    """Restores the counts of `state_dict`."""
    self._streaks = {name: _Streak(*state.get(name, ())) for name in NAMES}
    self._scored |= state.get('scored', {})


def same_policy(config: Config) -> bool:
  """Returns whether every learned token was sampled by exactly the weights that learn it, and recorded exactly.

  False where batches wait, groups of earlier steps are replayed, rows continue over several steps, a batch gets several
  updates, the update's prompt or forward pass differs on purpose, or the cache is rounded.
  """
  off = (config.rollout.stop, config.rollout.draft, config.replay.collect, config.curriculum.hint)
  off += (config.objective.activation_noise, config.optimizer.outer)
  return (
    config.mode != 'lag'
    and config.replay.reuse.fn not in ('mixed_groups', 'self_imitation', 'recomposed')
    and config.learner.minibatches == config.learner.passes == 1
    and config.rollout.cache_dtype != 'int8'
    and all(stage.fn == 'none' for stage in off)
  )


class _MetricFields(dict):
  """Metrics for str.format_map: names may hold slashes; metrics that are missing or None become NaN."""

  def __init__(self, row: dict[str, float], bounds: Bounds):
    # metrics.jsonl stores numbers that are not finite as null.
    super().__init__({k: math.nan if v is None else v for k, v in row.items()}, bounds=bounds)

  def __missing__(self, name: str) -> float:
    return math.nan


def _validate(settings: Any) -> None:
  for name, high in (('entropy', math.inf), ('truncated', 1), ('failed', 1), ('probs_gap', 1)):
    value = getattr(settings, name)
    if not (0 <= value <= high and math.isfinite(value)):
      raise UserError(
        f'config.monitoring.alarms.{name}={value!r} must be a finite number from 0 to {high}.'
      )
  for name in ('steps', 'right_rollouts'):
    value = getattr(settings, name)
    if value < 1:
      raise UserError(
        f'config.monitoring.alarms.{name}={value!r} must be a whole number from 1 up.'
      )
  unknown = [name for name in settings.stop if name not in (*NAMES, *ONCE)]
  if unknown:
    raise UserError(
      f'config.monitoring.alarms.stop names {unknown[0]!r}; choose of: {", ".join(sorted((*NAMES, *ONCE)))}.'
    )
