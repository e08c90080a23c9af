"""What the host does between two calls of the compiled program: choose prompts, grade what came, learn from both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import curriculum, data, replay, rewards
from jaxrl_llm import step as steps
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.step_spec import Program
from jaxrl_llm.monitoring import alarms
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.runner import hints, log_records, multi_turn, token_stats
from jaxrl_llm.types import ABORTED, TRUNCATED, Batch, Prompts, Rollout


class Parts(NamedTuple):
  """What a run is made of, all checked before anything is compiled."""

  config: Any
  model: Any
  mesh: jax.sharding.Mesh
  program: Program
  tables: data.Tables
  curriculum: curriculum.Curriculum
  lengths: curriculum.LengthEstimate
  unfinished: replay.Unfinished
  drafts: replay.Drafts
  successes: replay.Successes
  allocate: Callable[
    ..., curriculum.allocation.Allocation
  ]  # (α, β, lengths, slots, G) → slots each
  collect: replay.Collector | None  # None: every landed batch is learned as it is
  aid: hints.Aid | None  # None: prompts are never told of their answers
  vote: rewards.majority_vote.Majority | None  # None: the rows' own answers say what is right
  labels: curriculum.LabelCare | None  # None: labels are what they are
  read: Callable[[str], Any] | None  # text → the answer in it, for `labels`
  truncate: rewards.length_truncation.Outliers | None  # None: nothing is cut
  cap: Callable[..., int]  # (step, T) → tokens a row may take
  rewards: tuple[rewards.Part, ...]  # what config.rewards.fn gives, then each of its parts
  failures: rewards.Failures  # what is made of rollouts that could not be graded
  health: alarms.Health
  teacher: Any = None  # of config.objective.teacher
  adapter: Any = None  # of config.lora.init
  play: multi_turn.Play | None = None  # None: a reply is one turn, which nothing answers
  ledger: token_stats.Ledger | None = None  # None: rollout files tell nothing of single tokens


class Flight(NamedTuple):
  """What a call of the program was asked and gave: on its way from the device until it is landed."""

  index: int  # number of the step
  prompts: Prompts
  rollout: Rollout
  device: dict[str, Any]  # the program's own metrics
  learned: Batch | None = None  # what it learned before it sampled; None after a restart


class Landed(NamedTuple):
  """A flight, graded."""

  batch: Batch
  row: dict[str, float]  # of metrics.jsonl
  told: list[dict]  # rows of the rollout file


class Choice(NamedTuple):
  """Prompts for the free slots of a step, and what was thought of them."""

  index: np.ndarray  # int [slots]: what prompts lack, then new ones
  part: np.ndarray  # int32: which of its prompt's slots
  weight: np.ndarray  # float32: what it counts
  told: dict[str, Any]  # each new prompt once: a row of choices.jsonl


def propose(
  parts: Parts, index: int, choice: Choice | None = None
) -> tuple[Prompts, Rollout | None, Rollout | None, np.int32]:
  """The groups to continue, then as many new prompts as there is room for; drafts; the cap. Source: none."""
  config, held = parts.config, parts.unfinished
  chosen, part_P, weight_P, _ = choice or choose(parts, index)
  fresh = parts.tables.train.prompts(chosen, born=index)
  if parts.program.parts > 1:
    fresh = fresh._replace(part_P=part_P, weight_P=weight_P)
  if parts.aid is not None:
    fresh = parts.aid.give(fresh, index)
  fresh = fresh._replace(expected_P=parts.lengths(chosen))
  if parts.play is not None:
    parts.play.at(index)
    rows = [parts.tables.train.rows[i] for i in fresh.index_P]
    fresh = parts.play.opened(fresh, rows, config.prompt_tokens)
  empty, begun = steps.empty_rollout(parts.program), None
  if config.rollout.stop.fn != 'none' or parts.play is not None:
    fresh, begun = held.begin(fresh, empty)
  drafts = config.rollout.draft.fn != 'none'
  draft = parts.drafts.take(fresh.index_P, empty) if drafts else None
  return fresh, begun, draft, np.int32(parts.cap(index, config.completion_tokens))


def choose(parts: Parts, index: int) -> Choice:
  """A prompt for every free slot: what prompts lack, then new ones. Source: none."""
  config, held = parts.config, parts.unfinished
  asked, part, busy = np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
  if len(held):
    busy = held.prompts.index_P
  if parts.collect is not None:
    asked, part = parts.collect.requests()
    busy = np.concatenate([busy, parts.collect.held])
  room = config.prompts - len(held) - len(asked)
  count = min(max(room // config.curriculum.slots_per_prompt, 1), room)
  aided = parts.aid and parts.aid.aided(index)
  # One prompt may not run twice at once.
  proposal = parts.curriculum.propose(index, count, parts.lengths, aided, busy)
  parts.curriculum.accept(proposal)
  chosen = proposal.index
  if config.curriculum.slots_per_prompt == 1:
    slots_N, weight_N = np.ones(len(chosen), int), np.ones(len(chosen))
  else:
    told = *parts.curriculum.posterior(chosen), parts.lengths(chosen)
    slots_N, weight_N = parts.allocate(*told, room, config.rollouts)
    # All slots of a prompt are one group.
    proposal.p_mixed[:] = parts.curriculum.predict(chosen, slots_N * config.rollouts)[2]
  ones, own = np.ones(len(asked)), [np.arange(n) for n in slots_N]
  return Choice(
    np.concatenate([asked, np.repeat(chosen, slots_N)]),
    np.concatenate([part, *own]).astype(np.int32),
    np.concatenate([ones, np.repeat(weight_N, slots_N)]).astype(np.float32),
    {'training/global_step': index}
    | log_records.choice(proposal, parts.curriculum.visits(chosen), asked, busy),
  )


def land(parts: Parts, pool: rewards.Pool, flight: Flight) -> Landed:
  """Waits for a flight, holds back what is unfinished, grades the rest and tells the curriculum. Source: none."""
  device = {k: float(v) for k, v in flight.device.items()}
  rollout = sharding.fetch(flight.rollout)
  rollout, whole_P, held = _hold(parts, flight.prompts, rollout, flight.index)
  batch, rows, marks, counts = _grade(parts, pool, flight.prompts, rollout)
  row = {'training/global_step': flight.index} | device | _observe(parts, batch, whole_P)
  row |= counts | held | log_records.metrics(batch)
  written = parts.ledger and flight.index % parts.config.monitoring.rollouts_every == 0
  numbers = parts.ledger(batch, marks.shown) if written else {}
  lines = log_records.rows_of(rows, marks, batch, flight.index, numbers)
  if flight.index == 0 and parts.vote is None and parts.play is None:
    row |= _first_look(parts, pool, rows, marks)
  if parts.aid is not None:
    batch, of_hints = parts.aid.learn(batch, whole_P)
    row |= of_hints
  learned = parts.successes.join(batch, parts.config.seed, flight.index)
  parts.successes.keep(batch)
  if parts.collect is not None:
    row |= parts.collect.add(learned, flight.index)
    learned, numbers = parts.collect.take(steps.empty_batch(parts.program), flight.index)
    row |= numbers
  if parts.successes.count:
    row['replay/rows'] = int((learned.rollout.length_B[learned.replayed_B > 0] > 0).sum())
    row['replay/prompts'] = len(parts.successes.held)
  # The device looks at rewards; success is the host's.
  return Landed(learned._replace(success_B=None), row, lines)


def packed(flight: Flight) -> dict[str, Any]:
  """A flight for the checkpoint: it waits for the device. Source: none."""
  prompts, rollout = (sharding.fetch(x)._asdict() for x in (flight.prompts, flight.rollout))
  device = {k: float(v) for k, v in flight.device.items()}
  return dict(index=flight.index, prompts=prompts, rollout=rollout, device=device)


def unpacked(host: dict[str, Any]) -> Flight:
  """Back from `packed`. Source: none."""
  return Flight(
    host['index'], Prompts(**host['prompts']), Rollout(**host['rollout']), host['device']
  )


def _hold(parts: Parts, prompts: Prompts, rollout: Rollout, index: int):
  """Keeps what goes on next step and what may be a draft; returns the rollout without the unfinished groups."""
  whole_P, dropped = parts.unfinished.keep(prompts, rollout, index)
  aborted_B = rollout.reason_B == ABORTED
  rollout = replay.blank(rollout, np.repeat(whole_P, parts.config.rollouts) & ~aborted_B)
  held = len(parts.unfinished)
  counts = {'generate/unfinished_groups': held, 'generate/dropped_groups': dropped}
  counts['generate/aborted_rows'] = int(aborted_B.sum())
  if parts.config.rollout.draft.fn != 'none':
    parts.drafts.keep(prompts.index_P, rollout)
    counts |= parts.drafts.metrics()
  # What only rows that go on, and drafts, are in need of.
  return rollout._replace(memory_BxM=None, noise_BxT=None), whole_P, counts


class _Marks:
  """What a step's rows were given; some are graded more than once, and then the last time counts."""

  def __init__(self, parts: Parts, pool: rewards.Pool, texts: list[str], rollout: Rollout):
    self.parts, self.pool, self.texts, self.length_B = parts, pool, texts, rollout.length_B
    self.turns = rollout.turns
    self.shown = (
      texts  # what the log tells: of many turns all of them, and what was said in between
    )
    self.part_BxK = np.zeros((len(texts), len(parts.rewards)), np.float32)
    self.outcome_B = np.full(len(texts), -1, np.int8)  # −1: not graded
    self.counts: dict[str, int] = {}
    self.message = ''  # the first failure

  def grade(self, rollout: Rollout, at: Sequence[int], rows: list) -> Rollout:
    """Grades texts[b] against its row for each b of `at`; returns the rollout without the dropped ones."""
    at = np.asarray(at, int)
    if not len(at) and self.counts:
      return rollout
    found = self._scores(at, rows)
    self.counts = {k: v + self.counts.get(k, 0) for k, v in found.counts.items()}
    self.message = self.message or found.message
    self.outcome_B[at] = found.outcome_B
    if self.parts.vote is not None:  # the rows' own answers, if there are any, are for the log
      self.part_BxK[at] = found.parts_BxK
      return rollout
    self.part_BxK[at], drop_N = self.parts.failures.apply(found)
    keep_B = np.ones(len(self.texts), bool)
    keep_B[at[drop_N]] = False
    return replay.blank(rollout, keep_B)

  def _scores(self, at: np.ndarray, rows: list) -> rewards.Scores:
    ask = lambda: self.pool.score(rows, [self.texts[b] for b in at])  # noqa: E731
    if self.turns is None:
      return ask()
    turns = type(self.turns)(*(x[at] for x in self.turns))
    return self.parts.play.scores(turns, ask, len(self.parts.rewards))

  def metrics(self, real: np.ndarray, rollout: Rollout) -> dict[str, float]:
    """Of the rows `real`; tells the window of failures of them, too."""
    if self.parts.vote is not None:
      return self.counts
    outcome_N = self.outcome_B[real]
    self.parts.failures.observe(outcome_N, self.message)
    failed = float(np.isin(outcome_N, rewards.FAILURES).mean()) if len(real) else 0.0
    dropped = int((rollout.length_B[real] == 0).sum())
    told = {'grade/failed_share': failed, 'grade/dropped': dropped}
    graded = real[outcome_N == rewards.OK]
    return (
      self.counts | told | outcomes.metrics(self.part_BxK[graded, 0], self.parts.config.rewards)
    )


def _first_look(parts: Parts, pool: rewards.Pool, rows: list, marks: _Marks) -> dict[str, float]:
  at = np.flatnonzero(marks.outcome_B == rewards.OK)
  if not len(at):
    return {}
  asked, said = [rows[b] for b in at], [marks.texts[b] for b in at]
  prompts = [data.prompt_text(row, parts.config.data) for row in asked]
  return rewards.first_look(parts.config.rewards, pool, asked, said, prompts, marks.part_BxK[at])


def _grade(parts: Parts, pool: rewards.Pool, prompts: Prompts, rollout: Rollout):
  """The batch to learn from, with rows and marks for the log; empty rows are not graded and get 0."""
  decode, table = parts.model.tokenizer.decode, parts.tables.train
  said = [t[:n] for t, n in zip(rollout.tokens_BxT, rollout.length_B, strict=True)]
  if parts.aid is not None:  # a reply is judged whole, with what it was given to begin with
    begun = parts.aid.begun(prompts)
    said = [np.concatenate([begun[b // parts.config.rollouts], x]) for b, x in enumerate(said)]
  texts = shown = [decode(x.tolist()) for x in said]
  if rollout.turns is not None:  # graders read the last turn
    each = zip(rollout.tokens_BxT, rollout.turns.number_BxT, strict=True)
    texts = [(parts.play.texts(*one) or [''])[-1] for one in each]
  rows = [table.rows[i] for i in prompts.index_P for _ in range(parts.config.rollouts)]
  real = np.flatnonzero(rollout.length_B)
  marks = _Marks(parts, pool, texts, rollout)
  marks.shown = shown
  rollout = marks.grade(rollout, real, [rows[b] for b in real])
  rollout, cut = _cut(parts, marks, rows, rollout)
  rollout, relabeled = _relabeled(parts, marks, prompts, rows, rollout)
  counts, part_BxK = marks.metrics(real, rollout) | cut, marks.part_BxK
  real = np.flatnonzero(rollout.length_B)
  if len(parts.rewards) > 1 and len(real):
    means = zip(parts.rewards, part_BxK[real].mean(0), strict=True)
    counts = counts | {f'critic/score/{part.name}': float(mean) for part, mean in means}
  reward_B = part_BxK @ np.array([part.weight for part in parts.rewards], np.float32)
  right_B = part_BxK[:, 0] >= parts.config.rewards.right
  success_B = outcomes.success(part_BxK[:, 0], parts.config.rewards)
  rollout, reward_B, right_B, voted = _voted(parts, texts, rollout, reward_B, right_B)
  if parts.vote is not None:
    success_B = reward_B
  if prompts.weight_P is not None:
    weight_B = rollout.weight_B * np.repeat(prompts.weight_P, parts.config.rollouts)
    rollout = rollout._replace(weight_B=weight_B)
  demo = None
  if parts.program.method.needs_demo:
    asked, T = [table.rows[i] for i in prompts.index_P], parts.config.completion_tokens
    demo = data.demonstrations(asked, parts.model.tokenizer, T)
  right_B = right_B.astype(np.float32)
  batch = Batch(prompts, rollout, reward_B, right_B, demo, success_B=success_B)
  if parts.program.method.needs_parts:
    batch = batch._replace(parts_BxK=part_BxK)
  return batch, rows, marks, counts | relabeled | voted


def _cut(parts: Parts, marks: _Marks, rows, rollout: Rollout):
  """Outliers of all-right groups end where they are cut, and are graded again."""
  if parts.truncate is None:
    return rollout, {}
  group = lambda x: x.reshape(-1, parts.config.rollouts)  # noqa: E731
  length_B = parts.truncate.cut(
    group(marks.part_BxK[:, 0] >= parts.config.rewards.right), group(rollout.length_B)
  ).ravel()
  cut = np.flatnonzero(length_B < rollout.length_B)
  for b in cut:
    marks.texts[b] = parts.model.tokenizer.decode(rollout.tokens_BxT[b, : length_B[b]].tolist())
  reason_B = np.where(length_B < rollout.length_B, TRUNCATED, rollout.reason_B)
  rollout = rollout._replace(length_B=length_B, reason_B=reason_B.astype(rollout.reason_B.dtype))
  return marks.grade(rollout, cut, [rows[b] for b in cut]), {'grade/truncated': len(cut)}


def _relabeled(parts: Parts, marks: _Marks, prompts: Prompts, rows, rollout: Rollout):
  """Rewards by what the label is taken for now; `rows` keep that of the data."""
  if parts.labels is None:
    return rollout, {}
  G, changed = parts.config.rollouts, []
  real_PxG = rollout.length_B.reshape(-1, G) > 0
  for p in np.flatnonzero(real_PxG.any(1)):
    index, row = int(prompts.index_P[p]), rows[p * G]
    said = [answer_of(parts, marks.texts[p * G + g]) for g in np.flatnonzero(real_PxG[p])]
    parts.labels.observe([index], [said])
    given = answer_of(parts, row.answer)
    label = parts.labels.label(index, given)
    if label != given:
      changed += [(b, row._replace(answer=label)) for b in p * G + np.flatnonzero(real_PxG[p])]
  rollout = marks.grade(rollout, [b for b, _ in changed], [row for _, row in changed])
  return rollout, {'labels/replaced': len({b // G for b, _ in changed})}


def answer_of(parts: Parts, text: str) -> str | None:
  """The answer in a text, in the form that equal ones share. Source: none."""
  found = parts.read(text)
  return None if found is None else str(found)


def suspects(parts: Parts) -> list[dict]:
  """Labels that rollouts contradict now, with their questions. Source: arXiv:2604.03993 (OLR)."""
  table = parts.tables.train.rows
  found = parts.labels.suspects(lambda index: answer_of(parts, table[index].answer))
  return [
    dict(one._asdict(), question=table[one.prompt].question, id=table[one.prompt].id)
    for one in found
  ]


def _voted(parts: Parts, texts: list[str], rollout: Rollout, reward_B, right_B):
  """Rewards by each group's own majority; by the rows' answers the log alone says how good it is."""
  if parts.vote is None:
    return rollout, reward_B, right_B, {}
  G, real_B = parts.config.rollouts, rollout.length_B > 0
  seen = [text if real else None for text, real in zip(texts, real_B, strict=True)]
  agree_B, winner_P = parts.vote.count(seen, G)
  asked_P = real_B.reshape(-1, G).any(1)
  right_P = (winner_P >= 0) & right_B[winner_P]
  told = {}
  if asked_P.any():
    told = {
      'critic/vote_accuracy': float(right_P[asked_P].mean()),
      'critic/vote_share': float(agree_B[real_B].mean()),
      'critic/label_score/mean': float(reward_B[real_B].mean()),
    }
  if parts.vote.learn_from:
    rollout = replay.blank(rollout, np.arange(len(texts)) % G < parts.vote.learn_from)
  return rollout, agree_B.astype(np.float32), agree_B, told


def _observe(parts: Parts, batch: Batch, whole_P: np.ndarray) -> dict[str, float]:
  """Tells the curriculum what each whole group says of its prompt, and the lengths how long it was."""
  if batch.prompts.hint_P is not None:  # what was told says nothing of the plain prompt
    whole_P = whole_P & (batch.prompts.hint_P == 0)
  score_BxK = outcomes.compared(parts.program.method, batch)
  found = curriculum.gather_evidence(batch, score_BxK, whole_P)
  # Also of nothing: a step has passed.
  parts.curriculum.observe(*found)
  parts.lengths.observe(found.index_V, found.tokens_V / found.count_V)
  return parts.curriculum.metrics()
