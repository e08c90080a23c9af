"""The exchange of completions with other runs: a graded batch becomes text, and text becomes graded rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_llm import data
from jaxrl_llm.replay import group_batches
from jaxrl_llm.replay.shared_rollouts import Completion, SharedGroup, SharedRollouts
from jaxrl_llm.runner.context import RunContext, ScorePool
from jaxrl_llm.runner.grading import GradedStep, ScoreTable
from jaxrl_llm.types import STOPPED, TRUNCATED, Batch, Row, UserError


def exchange(
  context: RunContext,
  store: SharedRollouts,
  pool: ScorePool,
  graded: GradedStep,
  mixed_P: np.ndarray,
  step: int,
) -> Batch:
  """Publish the mixed groups of a graded step; add slots with groups of other runs behind the fresh ones.

  Their rows are tokenized and graded anew, and have no log-probs: the update computes those of its first weights.
  """
  batch = graded.batch._replace(success_B=None)  # of the host alone
  store.publish([_shared(graded, slot) for slot in np.flatnonzero(mixed_P).tolist()], step)
  store.collect(step)
  count = store.slots(len(batch.prompts.index_P))
  groups = store.draw(count, context.config.seed, step)
  others = graded_slots(context, pool, groups, group_batches.empty_slots(batch, count), step)
  fresh_B, others_B = np.zeros_like(batch.reward_B), np.ones_like(others.reward_B)
  return group_batches.joined(
    [batch._replace(replayed_B=fresh_B), others._replace(replayed_B=others_B)]
  )


def _shared(graded: GradedStep, slot: int) -> SharedGroup:
  rollout, G = graded.batch.rollout, len(graded.rows) // len(graded.batch.prompts.index_P)
  rows = [b for b in range(slot * G, slot * G + G) if rollout.length_B[b]]
  completions = [
    Completion(graded.scores.texts[b], bool(rollout.reason_B[b] == STOPPED)) for b in rows
  ]
  return SharedGroup(graded.rows[slot * G], tuple(completions))


def graded_slots(
  context: RunContext,
  pool: ScorePool,
  groups: Sequence[SharedGroup],
  empty: Batch,
  step: int,
) -> Batch:
  """The empty slots with the groups in the first ones, as far as their prompts fit; at most G rows of each."""
  config, G = context.config, context.config.rollouts
  prompts = [(_prompt(context, group.row), group) for group in groups]
  fitting = [(ids, group) for ids, group in prompts if 0 < len(ids) <= config.prompt_tokens]
  P, B = len(empty.prompts.index_P), len(empty.reward_B)
  tokens_P = [ids for ids, _ in fitting] + [_NO_TOKENS] * (P - len(fitting))
  tokens_B, texts, rows = [_NO_TOKENS] * B, [''] * B, [_NO_ROW] * B
  stopped_B = np.zeros(B, bool)
  for slot, (_, group) in enumerate(fitting):
    for b, completion in enumerate(group.completions[:G], slot * G):
      tokens_B[b], texts[b], stopped_B[b] = _completion(context, completion)
      rows[b] = group.row
  tokens_PxL, length_P = data.pad_rows(tokens_P, config.prompt_tokens)
  index_P = np.where(length_P > 0, -2 - np.arange(P), -1).astype(np.int32)  # of no row of the data
  tokens_BxT, length_B = data.pad_rows(tokens_B, config.completion_tokens)
  rollout = empty.rollout._replace(
    tokens_BxT=tokens_BxT,
    length_B=length_B,
    reason_B=np.where(stopped_B, STOPPED, TRUNCATED).astype(empty.rollout.reason_B.dtype),
    version_BxT=np.full_like(empty.rollout.version_BxT, -1),
  )
  scores = ScoreTable(context, pool, (texts, texts), rollout)
  real = np.flatnonzero(length_B)
  if len(real):
    rollout = scores.grade(rollout, real, [rows[b] for b in real])
  weights = np.array([part.weight for part in context.grading.rewards], np.float32)
  return empty._replace(
    prompts=empty.prompts._replace(
      tokens_PxL=tokens_PxL, length_P=length_P, index_P=index_P, born_P=np.full(P, step, np.int32)
    ),
    rollout=rollout,
    reward_B=scores.part_BxK @ weights,
    correct_B=scores.correct().astype(np.float32) * (length_B > 0),
    parts_BxK=None if empty.parts_BxK is None else scores.part_BxK,
  )


def _prompt(context: RunContext, row: Row) -> np.ndarray:
  """Token ids of another run's prompt; empty where the tokenizer or the template cannot render it."""
  try:
    return data.encode(row, context.config.data, context.models.policy.tokenizer)
  except UserError:
    return _NO_TOKENS


def _completion(context: RunContext, completion: Completion) -> tuple[np.ndarray, str, bool]:
  """(token ids, text, whether it stops) of a completion, cut at config.completion_tokens."""
  tokenizer, most = context.models.policy.tokenizer, context.config.completion_tokens
  ids = list(tokenizer.encode(completion.text))
  ids += [next(iter(tokenizer.end_ids))] if completion.stopped else []
  if len(ids) > most:
    return np.array(ids[:most], np.int32), tokenizer.decode(ids[:most]), False
  return np.array(ids, np.int32), completion.text, completion.stopped


_NO_TOKENS = np.zeros(0, np.int32)
_NO_ROW = Row('', '', (), '', '', {})
