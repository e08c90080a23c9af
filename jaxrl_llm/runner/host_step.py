"""The host's part of a step: choose prompts, build the inputs of the compiled step, land its rollouts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from jaxrl_llm import curriculum, replay
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.runner import (
  grading,
  hints,
  log_records,
  prompt_encoding,
  sharded_grading,
  shared_groups,
  source_metrics,
)
from jaxrl_llm.runner.context import (
  Choice,
  EncodedPrompts,
  Landed,
  PendingStep,
  ReceivedStep,
  RunContext,
  ScorePool,
)
from jaxrl_llm.types import ABORTED, Batch, JsonObject, Prompts, Rollout

# The inputs of the compiled step behind state and batch.
StepInputs = tuple[Prompts, Rollout | None, Rollout | None, np.int32]


def choose(context: RunContext, index: int, in_flight: Sequence[np.ndarray] = ()) -> Choice:
  """Choose a prompt for every free slot: prompts that wait for rollouts or follow their last visit, then new ones.

  `in_flight`: the prompts of steps that are not graded yet.
  """
  config, selection = context.config, context.selection
  unfinished, collector = context.replay.unfinished, context.replay.collector
  waiting, part, busy, running = *(np.zeros(0, np.int32) for _ in range(3)), 0
  if unfinished is not None and unfinished.prompts is not None:
    busy, running = unfinished.prompts.index_P, len(unfinished)
  if collector is not None:
    waiting, part = collector.requests()
    busy = np.concatenate([busy, collector.waiting_prompts])
  if selection.hints is not None:
    due = selection.hints.due(config.prompts - running - len(waiting))
    waiting, part = np.concatenate([waiting, due]), np.concatenate([part, 0 * due])
    busy = np.concatenate([busy, due, selection.hints.waiting])
  free = config.prompts - running - len(waiting)
  count = min(max(free // config.curriculum.slots_per_prompt, 1), free)
  hinted = selection.hints and selection.hints.posterior(index)
  # One prompt may not run twice at once, nor before its last rollouts are graded, unless there are too few others.
  taken = np.concatenate([busy, *in_flight])
  if len(context.tables.train) - len(np.unique(taken)) < count:
    taken = busy
  proposal = selection.curriculum.propose(index, count, selection.lengths, hinted, taken)
  selection.curriculum.accept(proposal)
  new, new_parts = proposal.index, [np.zeros(len(proposal.index), int)]
  weight = np.ones(len(new))
  if config.curriculum.slots_per_prompt > 1:
    slots_N, weight_N = _allocate(context, proposal, free)
    new, new_parts = np.repeat(new, slots_N), [np.arange(n) for n in slots_N]
    weight = np.repeat(weight_N, slots_N)
  visits = selection.curriculum.visits(proposal.index)
  return Choice(
    np.concatenate([waiting, new]),
    np.concatenate([part, *new_parts]).astype(np.int32),
    np.concatenate([np.ones(len(waiting)), weight]).astype(np.float32),
    {'training/global_step': index} | log_records.choice(proposal, visits, waiting, busy),
  )


def build_inputs(context: RunContext, index: int, choice: Choice | None = None) -> StepInputs:
  """Build the inputs of the compiled step.

  Returns (prompts, begun, draft, cap): unfinished groups then the chosen prompts; their rollouts so far; drafts; the
  most tokens of a completion in this step.
  """
  config, selection, episodes = context.config, context.selection, context.episodes
  chosen, part_P, weight_P, _ = choice or choose(context, index)
  prompts = context.tables.train.prompts(chosen, born=index)
  if context.spec.layout.slots_per_prompt > 1:
    prompts = prompts._replace(part_P=part_P, weight_P=weight_P)
  if selection.hints is not None:
    prompts = selection.hints.add_hints(prompts, index)
  prompts = prompts._replace(expected_P=selection.lengths(chosen))
  if episodes is not None:
    episodes.begin_step(index)
    rows, width = context.tables.train.rows_of(prompts), config.prompt_tokens
    prompts = episodes.open(prompts, rows, width, config.rollouts)
  begun, draft, cap_tokens, buffers = None, None, config.completion_tokens, context.replay
  if buffers.unfinished is not None:
    empty = empty_records.empty_rollout(context.spec)
    prompts, begun = buffers.unfinished.begin(prompts, empty)
  if buffers.drafts is not None:
    draft = buffers.drafts.take(prompts.index_P, empty_records.empty_rollout(context.spec))
  if selection.length_cap is not None:
    cap_tokens = selection.length_cap(index, cap_tokens)
  return prompts, begun, draft, np.int32(cap_tokens)


def land(context: RunContext, pool: ScorePool, pending: PendingStep) -> Landed:
  """Wait for a step's rollouts, set unfinished groups aside, grade the rest and update the curriculum."""
  return finish(context, pool, receive(context, pending))


def receive(context: RunContext, pending: PendingStep) -> ReceivedStep:
  """Wait for a step's rollouts and set unfinished groups aside."""
  held = _hold(context, pending.prompts, sharding.fetch(pending.rollout), pending.step)
  return ReceivedStep(pending._replace(rollout=held[0]), held[1], held[2])


def begin(context: RunContext, pool: sharded_grading.Pool, received: ReceivedStep) -> ReceivedStep:
  """Begin to grade a step in the background."""
  step = received.pending
  return received._replace(begun=grading.begin(context, pool, step.prompts, step.rollout))


def finish(context: RunContext, pool: ScorePool, received: ReceivedStep) -> Landed:
  """Wait for a step's scores and update the curriculum."""
  buffers, index = context.replay, received.pending.step
  pending, finished_P, held_metrics, begun = received
  graded = grading.grade(context, pool, pending.prompts, pending.rollout, begun)
  batch = graded.batch
  metrics = {'training/global_step': index} | _as_floats(pending.device_metrics)
  if context.selection.curriculum.features is not None:
    metrics |= _learn_features(context, pending.encoded, graded)
  metrics |= _observe(context, batch, finished_P) | graded.metrics | held_metrics
  metrics |= log_records.metrics(batch)
  if len(sources := context.tables.train.sources) > 1:
    metrics |= source_metrics.metrics(graded, sources)
  records = _rollout_records(context, graded, index)
  if index == 0 and context.grading.vote is None and context.episodes is None:
    metrics |= grading.first_step_metrics(context, pool, graded)
  if context.selection.hints is not None:
    measures = hints.Measures(graded.scores.part_BxK, sharding.fetch(pending.reliance_B))
    batch, hint_metrics = context.selection.hints.update(batch, finished_P, measures)
    metrics |= hint_metrics
  next_batch = batch
  if buffers.reuse is not None:
    next_batch = _with_replays(context, pool, graded, batch, index)
  if buffers.collector is not None:
    metrics |= buffers.collector.add(next_batch, index)
    next_batch, collected = buffers.collector.take(empty_records.empty_batch(context.spec), index)
    metrics |= collected
  if buffers.reuse is not None:
    metrics |= buffers.reuse.metrics(next_batch, len(batch.prompts.index_P))
  # The device reads rewards; success rates are used on the host alone.
  return Landed(next_batch._replace(success_B=None), metrics, records)


def _with_replays(
  context: RunContext,
  pool: ScorePool,
  graded: grading.GradedStep,
  batch: Batch,
  index: int,
) -> Batch:
  """The batch to learn from with rollouts of other steps or runs; the store gets all graded ones of this one."""
  store, mixed_P = context.replay.reuse, _mixed_slots(context, graded.batch)
  assert store is not None
  if isinstance(store, replay.SharedRollouts):
    return shared_groups.exchange(context, store, pool, graded, mixed_P, index)
  joined = store.join(batch, context.config.seed, index)
  store.keep(graded.batch, mixed_P, index)
  return joined


def _mixed_slots(context: RunContext, batch: Batch) -> np.ndarray:
  """Which slots hold a mixed group, bool [P]."""
  score_BxK = outcomes.compared(context.spec.objective.method, batch)
  exists_B, P = np.asarray(batch.rollout.length_B) > 0, len(batch.prompts.index_P)
  slot_B = np.repeat(np.arange(P), len(exists_B) // P)
  return np.asarray(outcomes.mixed(score_BxK, exists_B, slot_B, P))


def _learn_features(
  context: RunContext, encoded: EncodedPrompts | None, graded: grading.GradedStep
) -> dict[str, float]:
  """Stores what the step encoded for a prior of difficulty; returns how long it waited for that."""
  features = context.selection.curriculum.features
  assert features is not None
  began = time.perf_counter()
  encoded = sharding.fetch(encoded)
  waited = time.perf_counter() - began
  if encoded is None:
    features.put_nothing()
  else:
    prompt_encoding.store(features, encoded, graded.batch.prompts.index_P)
  prompt_encoding.observe_wording(features, graded)
  return {'timing_s/encode': waited}


def packed(pending: PendingStep) -> JsonObject:
  """A pending step for the checkpoint; waits for the device."""
  prompts, rollout = (sharding.fetch(x)._asdict() for x in (pending.prompts, pending.rollout))
  device = _as_floats(pending.device_metrics)
  host: JsonObject = dict(index=pending.step, prompts=prompts, rollout=rollout, device=device)
  if pending.encoded is not None:
    host['encoded'] = sharding.fetch(pending.encoded)._asdict()
  if pending.reliance_B is not None:
    host['reliance'] = sharding.fetch(pending.reliance_B)
  return host


def unpacked(host: JsonObject) -> PendingStep:
  """The inverse of `packed`."""
  prompts, rollout = Prompts(**host['prompts']), Rollout(**host['rollout'])
  encoded = EncodedPrompts(**host['encoded']) if 'encoded' in host else None
  step, device, reliance_B = host['index'], host['device'], host.get('reliance')
  return PendingStep(step, prompts, rollout, device, encoded=encoded, reliance_B=reliance_B)


def packed_received(received: ReceivedStep) -> JsonObject:
  """A step that is being graded, for the checkpoint."""
  pending, finished_P, metrics, _ = received
  return dict(pending=packed(pending), finished=finished_P, metrics=metrics)


def unpacked_received(host: JsonObject) -> ReceivedStep:
  """The inverse of `packed_received`; nothing is graded yet."""
  return ReceivedStep(unpacked(host['pending']), host['finished'], host['metrics'])


def _as_floats(device_metrics) -> dict[str, float]:
  return {name: float(value) for name, value in device_metrics.items()}


def _allocate(
  context: RunContext, proposal: curriculum.Proposal, free: int
) -> tuple[np.ndarray, np.ndarray]:
  """(slots, loss weight) of each proposed prompt, [N] each."""
  config, selection, chosen = context.config, context.selection, proposal.index
  alpha, beta = selection.curriculum.posterior(chosen)
  slots_N, weight_N = selection.allocate(
    alpha, beta, selection.lengths(chosen), free, config.rollouts
  )
  # All slots of a prompt are one group.
  proposal.p_mixed[:] = selection.curriculum.predict(chosen, slots_N * config.rollouts)[2]
  return slots_N, weight_N


def _hold(context: RunContext, prompts: Prompts, rollout: Rollout, index: int):
  """Keeps unfinished groups and drafts; (rollout of the finished groups, which are finished [P], metrics)."""
  unfinished, drafts = context.replay.unfinished, context.replay.drafts
  finished_P, held, dropped = np.ones(len(prompts.index_P), bool), 0, 0
  if unfinished is not None:
    finished_P, dropped = unfinished.keep(prompts, rollout, index)
    held = len(unfinished)
  aborted_B = rollout.reason_B == ABORTED
  keep_B = np.repeat(finished_P, context.config.rollouts) & ~aborted_B
  if not keep_B.all():
    rollout = replay.blank(rollout, keep_B)
  metrics: dict[str, float] = {
    'generate/unfinished_groups': held,
    'generate/dropped_groups': dropped,
    'generate/aborted_rows': int(aborted_B.sum()),
  }
  if drafts is not None:
    drafts.keep(prompts.index_P, rollout)
    metrics |= drafts.metrics()
  if context.selection.hints is not None:
    rollout, asked = context.selection.hints.receive(prompts, rollout)
    metrics |= asked
  # Only continued rows and drafts need these fields.
  return rollout._replace(memory_BxM=None, noise_BxT=None), finished_P, metrics


def _rollout_records(context: RunContext, graded: grading.GradedStep, index: int) -> list[dict]:
  """Rows of the rollout file, with per-token values where the file is written."""
  token_values = {}
  if context.token_stats and index % context.config.monitoring.rollouts_every == 0:
    token_values = context.token_stats(graded.batch, graded.scores.logged_texts)
  return log_records.rollout_records(graded.rows, graded.scores, graded.batch, index, token_values)


def _observe(context: RunContext, batch: Batch, finished_P: np.ndarray) -> dict[str, float]:
  """Updates the success-rate posterior and the length estimate from finished groups; returns metrics."""
  if batch.prompts.hint_P is not None:  # hinted rollouts do not update the difficulty posterior
    finished_P = finished_P & (batch.prompts.hint_P == 0)
  selection = context.selection
  score_BxK = outcomes.compared(context.spec.objective.method, batch)
  evidence = curriculum.gather_evidence(batch, score_BxK, finished_P)
  # Empty evidence is observed, too: posteriors age by steps.
  *plain, graded_V, truncated_graded_V = evidence
  selection.curriculum.observe(*plain, graded=graded_V, truncated_graded=truncated_graded_V)
  selection.lengths.observe(evidence.index_V, evidence.tokens_V / evidence.count_V)
  return selection.curriculum.metrics()
