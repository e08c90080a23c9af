"""Alarms: what is wrong with a run by its metrics, named, with what to do about it.

`conditions` looks at one step's row of metrics and needs nothing else; `Health` tells how long they last, and speaks
once when they begin.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxrl_llm.rewards import outcomes
from jaxrl_llm.types import UserError

# The bound where a sampler's kernels are rounded and the trainer's are not: some four times what was seen of
# SmolLM2-135M in float32, on 65 tokens of 4 answers: 1.3e-3, 1.0e-2 and 2.7e-2. A tiny model drawn at random is at
# 2e-4, 9e-4 and 4e-3.
_ROUNDED = dict(bfloat16=1e-2, int8=4e-2, float8_e4m3fn=0.1)


class Alarm(NamedTuple):
  """Something begins to be wrong."""

  name: str
  text: str


class Bounds(NamedTuple):
  """When a row of metrics is bad: config.monitoring.alarms."""

  entropy: float  # nats a token
  # mean |p of the sampler − p of the trainer|; inf where weights may differ on purpose
  probs_gap: float
  truncated: float  # share of rollouts
  failed: float  # share of rollouts
  right: float  # config.rewards.right
  low: float  # scores that count as no and as a whole success, see scores.bounds
  high: float


# What is only bad when it lasts.
LASTING = ('still', 'entropy', 'all_wrong', 'all_right', 'same_reward', 'truncated')
FIRST = ('format', 'unrewarded', 'prompt_paid')  # looked for in the first batch alone
NAMES = ('non_finite', 'probs_gap', 'grading', *FIRST, *LASTING)
ONCE = ('never_right', 'out_of_bounds')  # of a whole run, each at most once

_ADVICE = dict(
  non_finite='The loss or gradient was not finite: the update was skipped. Lower config.optimizer.learning_rate or '
  'clip_norm; if it comes again on the same data, look at these rows.',
  probs_gap='training/rollout_probs_diff_mean={training/rollout_probs_diff_mean:.1e} is above {bounds.probs_gap:g}: '
  'what was sampled was not sampled from the policy that learns. That is a fault of the program or the machine, not of '
  'the task: try config.dtype=float32, config.mode=split and config.rollout at its defaults, one at a time.',
  grading='{grade/failed_share:.0%} of the rollouts could not be graded ({grade/timeouts:.0f} time-outs, '
  '{grade/crashes:.0f} crashes, {grade/errors:.0f} errors; the log has the first): mend the grader or the rows, or '
  'raise config.rewards.deadline_s or memory_mb.',
  format='No reply of the first batch holds what config.rewards.fn reads, so that none can be right: ask for it in '
  'config.data.system or config.data.template, or choose the grader (its `tag`) that reads what the model writes.',
  unrewarded='No reply of the first batch got any reward. Read the first rollout file: does config.rewards.fn compare '
  'with what the rows call the answer (config.data.columns, answer_after), and in the form that the model writes?',
  prompt_paid='{grade/prompts_paid:.0%} of the prompts, graded as if they were replies, are paid in full: a reward for '
  'what the prompt says, or for repeating it. Look for the mark that config.rewards reads in config.data.system, '
  'template and the rows, or let the grader read the end of the reply alone.',
  still='The weights do not move: gradient {actor/grad_norm:.1e}, update {actor/update_norm:.1e}, although the '
  'learning rate is {actor/lr:.1e} and rewards differ within groups (their standard deviation is '
  '{critic/score/group_std:.1e} on average, and {frac_reward_zero_std:.0%} of the rows are masked or equal). Look at '
  'config.objective (does every token get rejected, actor/rejected_frac? does the advantage need right answers, as '
  'listwise does, and is no score at config.rewards.right={bounds.right:g}?) and config.optimizer.',
  entropy='Entropy is down to {actor/entropy:.4f} nats a token (config.monitoring.alarms.entropy={bounds.entropy:g}): the policy '
  'says nearly the same whatever is drawn, and groups have little left to compare. Go back to an earlier checkpoint '
  'with a lower config.optimizer.learning_rate, a higher config.temperature, or config.objective.trust_region.high=0.28.',
  all_wrong='No answer was right: all rewards are {critic/score/max:g}. Read a rollout file: does the model write what '
  'config.rewards.fn reads (the format), and is it cut off before the answer (config.completion_tokens)? Else the task '
  'is too hard: easier rows, config.sft.steps, or config.curriculum.hint.',
  all_right='All answers were right: all rewards are {critic/score/min:g}, and nothing can be learned from them. Give '
  'harder rows, or stop here.',
  same_reward='All rewards were the same, {critic/score/min:g}: nothing is learned from them. Does config.rewards tell '
  'good answers from bad?',
  truncated='{response_length/clip_ratio:.0%} of the rollouts were cut off at config.completion_tokens: raise it, ask '
  'for shorter answers, or see whether the model knows its end token (config.data.chat).',
  never_right='No score of {rollouts} rollouts reached config.rewards.right={bounds.right:g}: the highest is '
  '{grade/highest:g}, the lowest {grade/lowest:g}. Training goes on by the rewards that differ. To the curriculum all '
  'prompts are hard: it counts a rollout as the part of the way from {bounds.low:g} to {bounds.high:g} that its score '
  'makes, {best:.0%} at best, and prefers prompts that score high. What needs right answers goes '
  'without (config.replay.reuse, config.rewards.truncate, pruning, PRIME, DRPO), config.curriculum.hint takes every prompt for unsolved, and '
  'accuracy stays 0. If {grade/highest:g} is a right answer: --config.rewards.right={grade/highest:g}.',
  out_of_bounds='{grade/out_of_bounds:.1%} of the scores lie outside of {bounds.low:g} to {bounds.high:g}: they go '
  'from {grade/lowest:g} to {grade/highest:g}. The curriculum takes each for the nearer bound; rewards are learned '
  "from as they are. If the grader scores that far: --config.rewards.bounds='({least:g}, {most:g})'.",
)


def conditions(row: dict[str, float], bounds: Bounds) -> dict[str, bool]:
  """Which alarms' conditions hold in one step; what a row does not tell is fine. Source: none."""
  get = lambda name, default=math.nan: float(row.get(name, default))  # noqa: E731
  same = get('critic/score/min') == get('critic/score/max')
  right = get('curriculum/observed_success') if same else math.nan
  learned = get('training/trained_tokens', 0) > 0
  skipped = get('actor/skipped_updates', 0) > 0
  # By what the update masks, and by the rewards themselves: a wrong mask must not silence the alarm about it.
  differ = get('frac_reward_zero_std', 1) < 1 or get('critic/score/group_std', 0) > outcomes.SAME
  moves = learned and not skipped and differ and get('actor/lr', 0) > 0
  # Of loss and gradient; a mean over no rollouts is no sign, and how far the weights went is no gradient.
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
    still=moves and 0 in (get('actor/grad_norm', 1), get('actor/update_norm', 1)),
    entropy=learned and get('actor/entropy') < bounds.entropy,
    all_wrong=right == 0,
    all_right=right == 1,
    same_reward=same and right not in (0, 1),
    truncated=get('response_length/clip_ratio') > bounds.truncated,
  )


def bounds(config: Any, dtype: str) -> Bounds:
  """The bounds of a run whose trainer's pass is in `dtype`. Source: none."""
  spec = config.monitoring.alarms
  # In float32 sampler and trainer were never seen to differ by more than 2e-6.
  usual = 1e-4 if dtype == 'float32' else 1e-2
  rounded = 0 if config.learner.quantize else _ROUNDED.get(config.rollout.weights_dtype, 0)
  gap = spec['probs_gap'] or max(usual, rounded)
  gap = gap if same_policy(config) else math.inf
  ends = outcomes.bounds(config.rewards)
  return Bounds(
    spec['entropy'], gap, spec['truncated'], spec['failed'], config.rewards['right'], *ends
  )


def advice(name: str, row: dict[str, float], bounds: Bounds) -> str:
  """What an alarm means with the numbers of `row`, and what to do about it. Source: none."""
  return _ADVICE[name].format_map(_Values(row, bounds))


class Health:
  """How long each condition has held, and how long not."""

  def __init__(self, config: Any, dtype: str):
    """dtype: that of the trainer's pass. Raises UserError for a bound out of range or an unknown name.

    Source: none.
    """
    spec = config.monitoring.alarms
    for name, low, high in (('entropy', 0, math.inf), ('truncated', 0, 1), ('failed', 0, 1)):
      _within(spec, name, low, high)
    _within(spec, 'probs_gap', 0, 1)
    for name in ('steps', 'right_rollouts'):
      if spec[name] < 1:
        raise UserError(
          f'config.monitoring.alarms.{name}={spec[name]!r} must be a whole number from 1 up.'
        )
    unknown = [name for name in spec['stop'] if name not in (*NAMES, *ONCE)]
    if unknown:
      raise UserError(
        f'config.monitoring.alarms.stop names {unknown[0]!r}; choose of: {", ".join(sorted((*NAMES, *ONCE)))}.'
      )
    self.steps, self.stop = spec['steps'], tuple(spec['stop'])
    self.bounds = bounds(config, dtype)
    # Of each: steps it has held, in a row; steps it has not; 1 from when it is told until it is told off.
    self._seen = {name: [0, 0, 0] for name in NAMES}
    self._rollouts = spec['right_rollouts']
    self._scored = dict(rollouts=0, right=False, extremes=[], told=[])  # of the whole run

  def observe(self, row: dict[str, float]) -> tuple[dict[str, float], list[Alarm]]:
    """health/<name> = 1 while it lasts, for the metrics; and what begins with this step.

    What lasts only counts after `steps` steps in a row. It is told again after as many steps without it. A row
    without rollouts, or without an update, is as good as the last one. Source: none.
    """
    told, begin = {}, []
    for name, bad in conditions(row, self.bounds).items():
      held, off, on = self._seen[name]
      if bad or self._of_others(name, row):
        held, off = held + bad, 0 if bad else off
      else:
        held, off = 0, off + 1
      now = held >= (self.steps if name in LASTING else 1)
      if now and not on:
        text = advice(name, row, self.bounds)
        since = f' for {self.steps} steps' if name in LASTING else ''
        begin.append(Alarm(name, f'{name}{since}, at step {row["training/global_step"]}: {text}'))
      self._seen[name] = [held, off, int(now or (on and off < self.steps))]
      told[f'health/{name}'] = float(now)
    return told, begin + self._once(row)

  def _once(self, row: dict[str, float]) -> list[Alarm]:
    """The alarms of `ONCE` that ring with this step."""
    seen = self._scored
    if 'grade/right' not in row:
      return []
    extremes = [*seen['extremes'], row['grade/lowest'], row['grade/highest']]
    least, most = min(extremes), max(extremes)
    seen |= dict(
      rollouts=int(seen['rollouts'] + row.get('perf/rollouts', 0)),
      right=bool(seen['right'] or row['grade/right'] > 0),
      extremes=[least, most],
    )
    # Where all scores are equal, other alarms say so.
    never = (
      not seen['right'] and seen['rollouts'] >= self._rollouts and most - least > outcomes.SAME
    )
    bad = dict(never_right=never, out_of_bounds=row['grade/out_of_bounds'] > 0)
    begin, ends = [], self.bounds
    for name in (name for name in ONCE if bad[name] and name not in seen['told']):
      more = {'grade/lowest': least, 'grade/highest': most, 'rollouts': seen['rollouts']}
      more |= dict(least=min(least, ends.low), most=max(most, ends.high))
      more['best'] = min(max((most - ends.low) / (ends.high - ends.low), 0.0), 1.0)
      text = advice(name, row | more, ends)
      begin.append(Alarm(name, f'{name}, at step {row["training/global_step"]}: {text}'))
      seen['told'] = [*seen['told'], name]
    return begin

  def _of_others(self, name: str, row: dict[str, float]) -> bool:
    """Whether the row says nothing of this: no rollouts came, or nothing was learned."""
    learned = ('non_finite', 'probs_gap', 'still', 'entropy')
    return not row.get('training/trained_tokens' if name in learned else 'perf/rollouts', 1)

  def check(self, alarms: list[Alarm]) -> None:
    """Raises UserError for one that config.monitoring.alarms.stop names. Source: none."""
    for alarm in alarms:
      if alarm.name in self.stop:
        raise UserError(f'config.monitoring.alarms.stop names {alarm.name}: {alarm.text}')

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    return {name: list(seen) for name, seen in self._seen.items()} | dict(scored=dict(self._scored))

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    self._seen = {name: list(state.get(name, [0, 0, 0])) for name in NAMES}
    self._scored |= state.get('scored', {})


def same_policy(config: Any) -> bool:
  """Whether every token that is learned was sampled by the very weights that learn it, and exactly recorded.

  Not where batches wait, rows go on over several steps, several updates are taken on one batch, the update's prompt or
  pass is another on purpose, or the cache is rounded. Source: none.
  """
  off = (config.rollout.stop, config.rollout.draft, config.replay.collect, config.curriculum.hint)
  off += (config.objective.activation_noise, config.optimizer.outer)
  return (
    config.mode != 'lag'
    and config.learner.minibatches == 1
    and config.rollout.cache_dtype != 'int8'
    and all(part.fn == 'none' for part in off)
  )


class _Values(dict):
  """Names of metrics for str.format, which would take a slash for part of a name; nan for what is not told."""

  def __init__(self, row: dict[str, float], bounds: Bounds):
    # A number that was not finite is null in metrics.jsonl.
    super().__init__({k: math.nan if v is None else v for k, v in row.items()}, bounds=bounds)

  def __missing__(self, name: str) -> float:
    return math.nan


def _within(spec: Any, name: str, low: float, high: float) -> None:
  if not (low <= spec[name] <= high and math.isfinite(spec[name])):
    raise UserError(
      f'config.monitoring.alarms.{name}={spec[name]!r} must be a finite number from {low} to {high}.'
    )
