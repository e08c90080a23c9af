"""Rollouts and batches without tokens, as host arrays: the first values of a run, and what unfinished rows fill."""

from __future__ import annotations

import numpy as np

from jaxrl_llm import data
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.rollout import early_exit, slot_loop
from jaxrl_llm.types import Batch, Prompts, Rollout, Solutions, TeacherTokens, Turns


def empty_rollout(spec: StepSpec, prompts: int | None = None) -> Rollout:
  """Rows of no tokens for `prompts` prompts; None: those of a step."""
  count = spec.layout.prompts if prompts is None else prompts
  rollout = _empty_rows(spec, count * spec.rollout.decode.rollouts)
  memory_BxM = np.zeros((len(rollout.length_B), early_exit.MEMORY_SIZE), np.float32)
  return rollout._replace(
    memory_BxM=memory_BxM if spec.rollout.exit_memory else None,
    noise_BxT=np.zeros_like(rollout.tokens_BxT) if spec.rollout.drafts.records_noise else None,
  )


def empty_turns(rows: int, tokens: int) -> Turns:
  """The turns of rows without tokens."""
  zeros = lambda kind: np.zeros((rows, tokens), kind)  # noqa: E731
  return Turns(zeros(np.int32) - 1, zeros(np.float32), zeros(np.int32), np.zeros(rows, np.int8))


def empty_batch(spec: StepSpec) -> Batch:
  """A batch of no rollouts: the first update has nothing to learn from."""
  method, P = spec.objective.method, spec.layout.slots
  B, zeros_P = P * spec.layout.group, np.zeros(P, np.int32)
  demo = data.as_rollout(np.zeros((P, spec.rollout.decode.max_tokens), np.int32), zeros_P)
  has_replay = spec.layout.unrecorded or spec.layout.group > spec.rollout.decode.rollouts
  weight_K = method.weight_K if method.needs_parts else None
  zeros_BxL = np.zeros((B, spec.objective.solution_tokens), np.int32)
  return Batch(
    empty_prompts(spec, P),
    _empty_rows(spec, B),
    reward_B=np.zeros(B, np.float32),
    correct_B=np.zeros(B, np.float32),
    demo=demo if method.needs_demo else None,
    replayed_B=np.zeros(B, np.float32) if has_replay else None,
    imitation_B=np.zeros(B, np.float32) if spec.layout.imitates else None,
    solutions=Solutions(zeros_BxL, np.zeros(B, np.int32)) if method.needs_solution else None,
    teacher_tokens=_empty_teacher_tokens(spec, B),
    parts_BxK=None if weight_K is None else np.zeros((B, len(weight_K)), np.float32),
  )


def _empty_teacher_tokens(spec: StepSpec, rows: int) -> TeacherTokens | None:
  sizes = spec.objective.teacher_tokens
  if sizes is None:
    return None
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  B, E = rows, sizes.completion
  return TeacherTokens(
    prompt_BxL=zeros(B, sizes.prompt),
    prompt_length_B=zeros(B),
    tokens_BxE=zeros(B, E),
    length_B=zeros(B),
    span_BxE=zeros(B, E) - 1,
    own_span_BxT=zeros(B, spec.rollout.decode.max_tokens) - 1,
  )


def empty_prompts(spec: StepSpec, prompts: int) -> Prompts:
  """Prompts without tokens."""
  layout, P = spec.layout, prompts
  zeros_P = lambda: np.zeros(P, np.int32)  # noqa: E731
  has_parts = layout.slots_per_prompt > 1
  return Prompts(
    tokens_PxL=np.zeros((P, layout.prompt_tokens), np.int32),
    length_P=zeros_P(),
    index_P=zeros_P(),
    born_P=zeros_P(),
    expected_P=np.zeros(P, np.float32),
    part_P=zeros_P() if has_parts else None,
    weight_P=np.ones(P, np.float32) if has_parts else None,
    context_P=np.full(P, -1, np.int32) if layout.contexts else None,
    hint_P=np.zeros(P, np.float32) if layout.hints else None,
  )


def _empty_rows(spec: StepSpec, rows: int) -> Rollout:
  """Rows of the update: without what only a later call of `generate` reads."""
  B, T, records = rows, spec.rollout.decode.max_tokens, spec.rollout.decode.records
  zeros, top = lambda *shape: np.zeros(shape, np.int32), records.top_tokens  # noqa: E731
  return Rollout(
    tokens_BxT=zeros(B, T),
    logp_BxT=np.zeros((B, T), np.float32),
    length_B=zeros(B),
    reason_B=np.zeros(B, np.int8),
    version_BxT=zeros(B, T),
    weight_B=np.ones(B, np.float32),
    feature_BxF=np.zeros((B, spec.rollout.features), np.float32),
    turns=empty_turns(B, T) if spec.rollout.multi_turn else None,
    expert_BxTxNxk=_empty_routes(spec, B, T) if records.experts else None,
    top_id_BxTxK=zeros(B, T, top) if top else None,
    top_logp_BxTxK=np.zeros((B, T, top), np.float32) if top else None,
  )


def _empty_routes(spec: StepSpec, rows: int, tokens: int) -> np.ndarray:
  route = slot_loop.expert_shape(spec.model.config)
  return np.zeros((rows, tokens, *route.shape), route.dtype)
