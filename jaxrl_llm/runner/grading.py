"""Grading of a sampled step: texts, rewards, truncation, label refinement and majority vote, up to a `Batch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm import data, replay, rewards
from jaxrl_llm.runner import sharded_grading, solutions
from jaxrl_llm.runner.context import RunContext, ScorePool
from jaxrl_llm.types import TRUNCATED, Batch, Prompts, Rollout, Row, Turns

# Waits for scores that are computed meanwhile.
Begun = Callable[[], rewards.Scores]


class GradedStep(NamedTuple):
  """The batch of a step, and what the logs show of it."""

  batch: Batch
  rows: list[Row]  # [B]: the data row of each completion
  scores: ScoreTable
  metrics: dict[str, float]


class ScoreTable:
  """Scores of a step's completions. Some are graded more than once; the newest scores count."""

  def __init__(
    self,
    context: RunContext,
    pool: ScorePool,
    texts: tuple[list[str], list[str]],
    rollout: Rollout,
    begun: Begun | None = None,
  ):
    """`texts` as `_texts` returns them. `begun`: the first scores."""
    self.context, self.pool, self._begun = context, pool, begun
    self.texts, self.logged_texts = texts
    self.length_B, self.turns = rollout.length_B, rollout.turns
    self.part_BxK = np.zeros((len(self.texts), len(context.grading.rewards)), np.float32)
    self.outcome_B = np.full(len(self.texts), -1, np.int8)  # −1: not graded
    self.counts: dict[str, int] = {}
    self.message = ''  # of the first failure

  def grade(self, rollout: Rollout, at: Sequence[int] | np.ndarray, rows: list[Row]) -> Rollout:
    """Grade texts[b] against its row for each b of `at`; return the rollout without dropped completions."""
    at = np.asarray(at, int)
    if not len(at) and self.counts:
      return rollout
    scores = self._scores(at, rows)
    self.counts = {k: v + self.counts.get(k, 0) for k, v in scores.counts.items()}
    self.message = self.message or scores.message
    self.outcome_B[at] = scores.outcome_B
    if self.context.grading.vote is not None:  # labels, where there are any, are only logged
      self.part_BxK[at] = scores.parts_BxK
      return rollout
    self.part_BxK[at] = scores.parts_BxK
    if (scores.outcome_B == rewards.OK).all():
      return rollout
    self.part_BxK[at], drop_N = self.context.grading.failures.apply(scores)
    keep_B = np.ones(len(self.texts), bool)
    keep_B[at[drop_N]] = False
    return replay.blank(rollout, keep_B)

  def _scores(self, at: np.ndarray, rows: list[Row]) -> rewards.Scores:
    begun, self._begun = self._begun, None
    grade = begun or (lambda: self.pool.score(rows, [self.texts[b] for b in at]))
    if self.turns is None or self.context.episodes is None:
      return grade()
    turns = Turns(*(x[at] for x in self.turns))
    return self.context.episodes.score(turns, grade, len(self.context.grading.rewards))

  def metrics(self, real: np.ndarray, rollout: Rollout) -> dict[str, float]:
    """Metrics of the completions `real`; adds them to the window of failures, too."""
    if self.context.grading.vote is not None:
      return dict(self.counts)
    outcome_N = self.outcome_B[real]
    self.context.grading.failures.observe(outcome_N, self.message)
    failed = float(np.isin(outcome_N, rewards.FAILURES).mean()) if len(real) else 0.0
    dropped = int((rollout.length_B[real] == 0).sum())
    shares = {'grade/failed_share': failed, 'grade/dropped': dropped}
    graded = real[outcome_N == rewards.OK]
    scores_N = self.part_BxK[graded, 0]
    return self.counts | shares | self.context.grading.scale.metrics(scores_N)

  def correct(self) -> np.ndarray:
    """bool [B]: whether the score of config.rewards.fn reaches config.rewards.right."""
    return self.part_BxK[:, 0] >= self.context.config.rewards.right


def begin(
  context: RunContext, pool: sharded_grading.Pool, prompts: Prompts, rollout: Rollout
) -> Begun:
  """Begin to score a sampled step, of one turn, as `grade` does first."""
  texts, _ = _texts(context, prompts, rollout)
  rows, real = _rows(context, prompts), np.flatnonzero(rollout.length_B)
  return pool.begin([rows[b] for b in real], [texts[b] for b in real])


def grade(
  context: RunContext,
  pool: ScorePool,
  prompts: Prompts,
  rollout: Rollout,
  begun: Begun | None = None,
) -> GradedStep:
  """Grade a sampled step; `begun` as `begin` returns it. Completions of length 0 are not graded and get reward 0."""
  config, grading = context.config, context.grading
  scores = ScoreTable(context, pool, _texts(context, prompts, rollout), rollout, begun)
  rows, real = _rows(context, prompts), np.flatnonzero(rollout.length_B)
  rollout = scores.grade(rollout, real, [rows[b] for b in real])
  changes: dict[str, float] = {}  # metrics of the stages that change completions or labels
  if grading.truncate is not None:
    rollout, changes = _truncate(context, scores, rows, rollout)
  if grading.labels is not None:
    rollout, relabeled = _relabel(context, scores, prompts, rows, rollout)
    changes |= relabeled
  metrics = scores.metrics(real, rollout) | changes
  if len(grading.rewards) > 1:
    metrics |= _part_means(context, scores, rollout)
  weights = np.array([part.weight for part in grading.rewards], np.float32)
  reward_B, correct_B = scores.part_BxK @ weights, scores.correct()
  success_B = grading.scale.success(scores.part_BxK[:, 0])
  if grading.vote is not None:
    rollout, reward_B, correct_B, voted = _vote(context, scores, rollout, reward_B, correct_B)
    success_B, metrics = reward_B, metrics | voted
  if prompts.weight_P is not None:
    weight_B = rollout.weight_B * np.repeat(prompts.weight_P, config.rollouts)
    rollout = rollout._replace(weight_B=weight_B)
  demo = None
  if context.spec.objective.method.needs_demo:
    demo = _demonstrations(context, prompts)
  correct_B = correct_B.astype(np.float32)
  batch = Batch(prompts, rollout, reward_B, correct_B, demo, success_B=success_B)
  if context.spec.objective.method.needs_parts:
    batch = batch._replace(parts_BxK=scores.part_BxK)
  if context.spec.objective.solution_tokens:
    solved, shares = solutions.build(
      context, prompts, rows, scores.texts, correct_B * (rollout.length_B > 0)
    )
    batch, metrics = batch._replace(solutions=solved), metrics | shares
  if context.teacher_text is not None:
    tokens, shares = context.teacher_text.build(prompts, rollout)
    batch, metrics = batch._replace(teacher_tokens=tokens), metrics | shares
  return GradedStep(batch, rows, scores, metrics)


def first_step_metrics(context: RunContext, pool: ScorePool, graded: GradedStep) -> dict:
  """Metrics of the first step alone: checks of the reward function and its settings."""
  scores = graded.scores
  at = np.flatnonzero(scores.outcome_B == rewards.OK)
  if not len(at):
    return {}
  rows, texts = [graded.rows[b] for b in at], [scores.texts[b] for b in at]
  prompts = [data.prompt_text(row, context.config.data) for row in rows]
  part_NxK = scores.part_BxK[at]
  return rewards.check_first_batch(context.config.rewards, pool, rows, texts, prompts, part_NxK)


def normalized_answer(context: RunContext, text: str) -> str | None:
  """The answer of a text in the form that equal answers share; None without one."""
  read_answer = context.grading.read_answer
  answer = read_answer(text) if read_answer is not None else None
  return None if answer is None else str(answer)


def suspect_labels(context: RunContext) -> list[dict]:
  """Labels that the majority of rollouts contradicts now, with their questions. arXiv:2604.03993 (OLR)."""
  rows, labels = context.tables.train.rows, context.grading.labels
  if labels is None:
    return []
  label = lambda index: normalized_answer(context, rows[index].answer)  # noqa: E731
  return [
    dict(suspect._asdict(), question=rows[suspect.prompt].question, id=rows[suspect.prompt].id)
    for suspect in labels.suspects(label)
  ]


def _rows(context: RunContext, prompts: Prompts) -> list[Row]:
  """The data row of each completion."""
  rows = context.tables.train.rows_of(prompts)
  return [row for row in rows for _ in range(context.config.rollouts)]


def _texts(
  context: RunContext, prompts: Prompts, rollout: Rollout
) -> tuple[list[str], list[str]]:  # fmt: skip
  """The completions [B] as reward functions read them, and as logs show them; a hinted one together with its prefix.

  With several turns, reward functions read one of them, and logs show all turns and observations.
  """
  G, hints = context.config.rollouts, context.selection.hints
  token_ids = [t[:n] for t, n in zip(rollout.tokens_BxT, rollout.length_B, strict=True)]
  if hints is not None:
    prefixes = hints.prefixes(prompts)
    token_ids = [np.concatenate([prefixes[b // G], x]) for b, x in enumerate(token_ids)]
  tokenizer = context.models.policy.tokenizer
  texts = graded_texts = [tokenizer.decode(x.tolist()) for x in token_ids]
  episodes = context.episodes
  if rollout.turns is not None and episodes is not None:
    turns = zip(rollout.tokens_BxT, rollout.turns.number_BxT, strict=True)
    graded_texts = [episodes.graded_text(*row) for row in turns]
  return graded_texts, texts


def _part_means(context: RunContext, scores: ScoreTable, rollout: Rollout) -> dict[str, float]:
  """The mean of each reward."""
  parts, real = context.grading.rewards, np.flatnonzero(rollout.length_B)
  if not len(real):
    return {}
  means = zip(parts, scores.part_BxK[real].mean(0), strict=True)
  return {f'critic/score/{part.name}': float(mean) for part, mean in means}


def _demonstrations(context: RunContext, prompts: Prompts) -> Rollout:
  """One demonstration for each prompt."""
  rows, T = context.tables.train.rows_of(prompts), context.config.completion_tokens
  return data.demonstrations(rows, context.models.policy.tokenizer, T)


def _truncate(
  context: RunContext, scores: ScoreTable, rows: list[Row], rollout: Rollout
) -> tuple[Rollout, dict[str, float]]:
  """Shortens length outliers of all-correct groups and grades them again; (rollout, metrics)."""
  assert context.grading.truncate is not None
  by_group = lambda x: x.reshape(-1, context.config.rollouts)  # noqa: E731
  length_PxG = context.grading.truncate.cut(by_group(scores.correct()), by_group(rollout.length_B))
  length_B = length_PxG.ravel()
  shortened = np.flatnonzero(length_B < rollout.length_B)
  for b in shortened:
    scores.texts[b] = context.models.policy.tokenizer.decode(
      rollout.tokens_BxT[b, : length_B[b]].tolist()
    )
  reason_B = np.where(length_B < rollout.length_B, TRUNCATED, rollout.reason_B)
  rollout = rollout._replace(length_B=length_B, reason_B=reason_B.astype(rollout.reason_B.dtype))
  rollout = scores.grade(rollout, shortened, [rows[b] for b in shortened])
  return rollout, {'grade/truncated': len(shortened)}


def _relabel(
  context: RunContext, scores: ScoreTable, prompts: Prompts, rows: list[Row], rollout: Rollout
):
  """Grades groups again whose label is replaced by the majority's; (rollout, metrics). `rows` keep their labels."""
  labels, G = context.grading.labels, context.config.rollouts
  assert labels is not None
  changed: list[tuple[int, Row]] = []
  real_PxG = rollout.length_B.reshape(-1, G) > 0
  for p in np.flatnonzero(real_PxG.any(1)):
    index, row = int(prompts.index_P[p]), rows[p * G]
    real = p * G + np.flatnonzero(real_PxG[p])
    labels.observe([index], [[normalized_answer(context, scores.texts[b]) for b in real]])
    old = normalized_answer(context, row.answer)
    label = labels.label(index, old)
    if label is not None and label != old:
      changed += [(b, row._replace(answer=label)) for b in real]
  rollout = scores.grade(rollout, [b for b, _ in changed], [row for _, row in changed])
  return rollout, {'labels/replaced': len({b // G for b, _ in changed})}


def _vote(context: RunContext, scores: ScoreTable, rollout: Rollout, reward_B, correct_B):
  """Replaces rewards by agreement with the group's majority; (rollout, rewards, correct, metrics).

  Labels then only measure the accuracy of the vote.
  """
  vote = context.grading.vote
  assert vote is not None
  G, real_B = context.config.rollouts, rollout.length_B > 0
  texts = [text if real else None for text, real in zip(scores.texts, real_B, strict=True)]
  agree_B, winner_P = vote.count(texts, G)
  real_P = real_B.reshape(-1, G).any(1)
  correct_P = (winner_P >= 0) & correct_B[winner_P]
  metrics = {}
  if real_P.any():
    metrics = {
      'critic/vote_accuracy': float(correct_P[real_P].mean()),
      'critic/vote_share': float(agree_B[real_B].mean()),
      'critic/label_score/mean': float(reward_B[real_B].mean()),
    }
  if vote.learn_from:
    rollout = replay.blank(rollout, np.arange(len(texts)) % G < vote.learn_from)
  return rollout, agree_B.astype(np.float32), agree_B, metrics
