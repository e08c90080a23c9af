"""Attempts that the policy reflects on: requests, retries from the pivot of a report, and what is learned of both."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm import data, replay
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.curriculum import hint_rules, reflection
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.replay import WaitingSlots, group_batches, rollout_buffer
from jaxrl_llm.runner.follow_ups import FollowUps
from jaxrl_llm.runner.hints import NOT_MEASURED, Measures
from jaxrl_llm.types import PLAIN, REQUEST, RETRY, Batch, JsonObject, Prompts, Rollout


class Case(NamedTuple):
  """A prompt between its attempts and the retries."""

  group: Batch  # the attempts: one slot
  row: int  # of the attempt that is reflected on
  report: str = ''  # '': a reflection is requested next
  kept: int = 0  # tokens of that attempt before the pivot
  reply: Batch | None = None  # the reflection: one row, with reward 1

  @property
  def attempt(self) -> Batch:
    """The attempt that is reflected on: one row."""
    return group_batches.rows(self.group, np.array([self.row]))

  @property
  def token_ids(self) -> np.ndarray:
    """Those of that attempt."""
    rollout = self.group.rollout
    return np.asarray(rollout.tokens_BxT[self.row, : rollout.length_B[self.row]], np.int32)


class ReflectedRetries(FollowUps):
  """The step after a group that is not all right asks for reflections, and the step after that samples retries.

  See `hint_rules.reflected`. arXiv:2601.03715 (R3L).
  """

  def __init__(
    self,
    rule: hint_rules.Rule,
    table: data.PromptTable,
    tokenizer: Tokenizer,
    settings: DataConfig,
    seed: int,
  ):
    """As `HintProvider`, for a rule with `reflection`."""
    super().__init__(rule, table, tokenizer, settings, seed)
    self.cases: dict[int, Case] = {}  # by prompt
    self.slots = WaitingSlots()

  def receive(self, prompts: Prompts, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
    """Keep the reflections in the replies to requests; return the rollout without these rows, and metrics."""
    asked_P = np.asarray(prompts.context_P) == REQUEST
    rollout = rollout._replace(memory_BxM=None, noise_BxT=None)
    zeros_B, found = np.zeros(len(rollout.length_B), np.float32), 0
    replies = Batch(prompts, rollout, zeros_B, zeros_B)
    for p in np.flatnonzero(asked_P).tolist():
      index = int(prompts.index_P[p])
      if index not in self.cases or self.cases[index].report:
        continue
      case = self._reflected(index, group_batches.slots(replies, np.array([p])))
      if case is None:
        self.slots.groups.append(self.cases.pop(index).group)
      else:
        self.cases[index], found = case, found + 1
        self._next.append(index)
    metrics: dict[str, float] = {'hint/requests': int(asked_P.sum()), 'hint/reflections': found}
    return replay.blank(rollout, ~np.repeat(asked_P, len(zeros_B) // len(asked_P))), metrics

  def prefixes(self, prompts: Prompts) -> list[np.ndarray]:
    """The token ids of the steps before the pivot, for retries."""
    pairs = zip(np.asarray(prompts.index_P).tolist(), np.asarray(prompts.context_P), strict=True)
    known = [self.cases.get(index) if context == RETRY else None for index, context in pairs]
    return [np.zeros(0, np.int32) if x is None else x.token_ids[: x.kept] for x in known]

  def update(
    self, batch: Batch, finished_P: np.ndarray, measures: Measures = NOT_MEASURED
  ) -> tuple[Batch, dict[str, float]]:
    """As `HintProvider.update`; attempts are held back, and retries are learned without their guidance."""
    batch, metrics = super().update(batch, finished_P, measures)
    n_P = (np.asarray(batch.rollout.length_B).reshape(len(finished_P), -1) > 0).sum(1)
    context_P = np.asarray(batch.prompts.context_P)
    changed: dict[int, Batch | None] = {}
    retried = improved = 0
    for p in np.flatnonzero(finished_P).tolist():
      slot, index = group_batches.slots(batch, np.array([p])), int(batch.prompts.index_P[p])
      if context_P[p] == RETRY:
        case, changed[p] = self.cases.pop(index, None), None
        if case is not None and n_P[p]:
          changed[p], retried = self._learned(index, case, slot), retried + 1
          improved += self._keep_improvement(case, slot)
        elif case is not None:
          self.slots.groups.append(case.group)
      elif n_P[p] and self._holds(index, slot):
        changed[p] = None
    batch = self.slots.fill(batch, changed)
    waiting = {'hint/retries': retried, 'hint/improved': improved}
    return batch, metrics | waiting | {'hint/waiting_slots': len(self.slots)}

  def _holds(self, index: int, slot: Batch) -> bool:
    """Whether the attempts of a plain group wait for a reflection on the first failed one, which is requested."""
    wrong_G = (np.asarray(slot.correct_B) <= 0.5) & (np.asarray(slot.rollout.length_B) > 0)
    if index in self.cases or not wrong_G.any():
      return False
    case = Case(rollout_buffer.cut(slot), int(np.argmax(wrong_G)))
    if not reflection.steps_of(self._text(case)) or self._request(index, case) is None:
      return False
    self.cases[index] = case
    self._next.append(index)
    return True

  def _reflected(self, index: int, replies: Batch) -> Case | None:
    """The prompt's case with the first valid report in these rows whose retry fits; None without one."""
    case, rollout = self.cases[index], replies.rollout
    token_ids, steps = case.token_ids, len(reflection.steps_of(self._text(case)))
    for b in np.flatnonzero(np.asarray(rollout.length_B)).tolist():
      text = self.tokenizer.decode(rollout.tokens_BxT[b, : rollout.length_B[b]].tolist())
      report = self._reflection.report_in(text, steps)
      if report is None:
        continue
      kept = reflection.tokens_before(token_ids.tolist(), self.tokenizer.decode, report.pivot)
      found = case._replace(report=report.text, kept=kept)
      if max(map(len, self._retry_prompts(index, found))) <= self.table.prompt_tokens:
        reply = group_batches.rows(replies, np.array([b]))
        single = case.attempt._replace(prompts=reply.prompts, rollout=reply.rollout)
        return found._replace(reply=rollout_buffer.cut(_rewarded(single)))
    return None

  def _learned(self, index: int, case: Case, slot: Batch) -> Batch:
    """The retries of a slot with the attempt in place of one of them, all behind the question and the kept steps.

    The other attempts wait for a slot; there the attempt counts for the baseline alone.
    """
    weight_G = np.array(case.group.rollout.weight_B)
    weight_G[case.row] = 0
    rollout = case.group.rollout._replace(weight_B=weight_G)
    self.slots.groups.append(case.group._replace(rollout=rollout))
    exists_G = np.asarray(slot.rollout.length_B) > 0
    replaced = len(exists_G) - 1 - int(np.argmin(exists_G[::-1]))  # an empty row, or the last one
    others = group_batches.rows(slot, np.delete(np.arange(len(exists_G)), replaced))
    attempt = rollout_buffer.padded(rollout_buffer.behind(case.attempt, case.kept), slot)
    learned = group_batches.one_slot([attempt, others])
    _, plain = self._retry_prompts(index, case)
    tokens_1xL, length_1 = data.pad_rows([plain], self.table.prompt_tokens)
    prompts = learned.prompts._replace(tokens_PxL=tokens_1xL, length_P=length_1)
    return learned._replace(prompts=prompts)

  def _keep_improvement(self, case: Case, slot: Batch) -> bool:
    """Keeps the reflection and the first right retry that is better than the attempt, if there is one."""
    exists_G = np.asarray(slot.rollout.length_B) > 0
    better_G = np.asarray(slot.reward_B) > float(case.group.reward_B[case.row])
    improved = np.flatnonzero(exists_G & better_G & (np.asarray(slot.correct_B) > 0.5))
    if not len(improved) or case.reply is None:
      return False
    retry = _rewarded(group_batches.rows(slot, improved[:1]))
    self.slots.singles += [case.reply, rollout_buffer.cut(retry)]
    return True

  def _prompt(self, index: int) -> tuple[np.ndarray, int]:
    """Token ids of a prompt, of the request for a reflection or of the retry; and which of them."""
    case = self.cases.get(index)
    if case is not None and case.report:
      return self._retry_prompts(index, case)[0], RETRY
    request = None if case is None else self._request(index, case)
    return (self.table.tokens[index], PLAIN) if request is None else (request, REQUEST)

  def _request(self, index: int, case: Case) -> np.ndarray | None:
    """Token ids of the request for a reflection; None where it does not fit."""
    attempt = reflection.numbered(self._text(case))
    return self._asked(index, self._reflection.request, attempt=attempt)

  def _retry_prompts(self, index: int, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of the question with the report, and of the question alone; the kept steps follow in both."""
    guided = self._encode(index, self._reflection.guidance, report=case.report)
    starts, kept = (guided, self.table.tokens[index]), case.token_ids[: case.kept]
    guided, plain = (np.concatenate([start, kept]).astype(np.int32) for start in starts)
    return guided, plain

  def _text(self, case: Case) -> str:
    return self.tokenizer.decode(case.token_ids.tolist())

  @property
  def _reflection(self) -> reflection.Reflection:
    assert self.rule.reflection is not None
    return self.rule.reflection

  def state_dict(self) -> JsonObject:
    """The state for a checkpoint."""
    cases = {str(index): _plain(case) for index, case in self.cases.items()}
    return super().state_dict() | dict(cases=cases, slots=self.slots.state_dict())

  def load_state_dict(self, state: JsonObject) -> None:
    """Restore from `state_dict`."""
    super().load_state_dict(state)
    self.cases = {int(index): _from_plain(case) for index, case in state['cases'].items()}
    self.slots.load_state_dict(state['slots'])


def _rewarded(row: Batch) -> Batch:
  """The row with reward 1, as the official code has it."""
  one, success_B = np.ones_like(np.asarray(row.reward_B)), row.success_B
  success_B = None if success_B is None else np.ones_like(success_B)
  return row._replace(reward_B=one, correct_B=np.ones_like(row.correct_B), success_B=success_B)


def _plain(case: Case) -> JsonObject:
  replies = [] if case.reply is None else [group_batches.plain(case.reply)]
  fields = dict(row=case.row, report=case.report, kept=case.kept)
  return dict(fields, group=group_batches.plain(case.group), replies=replies)


def _from_plain(fields: JsonObject) -> Case:
  replies = [group_batches.from_plain(reply) for reply in fields['replies']]
  group, row = group_batches.from_plain(fields['group']), int(fields['row'])
  reply = replies[0] if replies else None
  return Case(group, row, str(fields['report']), int(fields['kept']), reply)
