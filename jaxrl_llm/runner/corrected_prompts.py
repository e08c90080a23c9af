"""Wrong completions that are completed anew from their first wrong step, and the groups that wait for it."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from jaxrl_llm import data, rewards
from jaxrl_llm.config.schema import DataConfig, RewardsConfig
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.replay import group_batches, rollout_buffer
from jaxrl_llm.runner.follow_ups import FollowUps
from jaxrl_llm.runner.hints import GUIDANCE, NOT_MEASURED, Measures
from jaxrl_llm.types import Batch, JsonObject, Prompts, UserError


class Held(NamedTuple):
  """A group in which no row is right, until its correction is graded."""

  group: Batch  # one slot, as graded; columns of padding are cut off
  row: int  # which of its rows is corrected
  start: int  # tokens of the row before its first wrong step

  @property
  def prefix(self) -> np.ndarray:
    """The token ids that are kept, int32 [start]."""
    return np.asarray(self.group.rollout.tokens_BxT[self.row, : self.start], np.int32)


class CorrectedPrompts(FollowUps):
  """The step after an all-wrong group continues the sound part of one of its rows; then the group is learned.

  arXiv:2602.24110 (SCOPE; reconstructed).
  """

  def __init__(
    self,
    rule: hint_rules.Rule,
    table: data.PromptTable,
    tokenizer: Tokenizer,
    settings: DataConfig,
    seed: int,
    part: int,
  ):
    """As `HintProvider`, for a rule with `correction`; `part` is the column of its reward among all rewards."""
    super().__init__(rule, table, tokenizer, settings, seed)
    self.part = part
    self.held: dict[int, Held] = {}  # by prompt

  def add_hints(self, prompts: Prompts, step: int) -> Prompts:
    """Return the prompts, with those of held groups before the prefix to continue; `hint_P` is 1 for these."""
    del step
    index_P = np.asarray(prompts.index_P).tolist()
    held_P = [self.held.get(index) for index in index_P]
    tokens = [
      self.table.tokens[index] if held is None else self._request(index, held)
      for index, held in zip(index_P, held_P, strict=True)
    ]
    tokens_PxL, length_P = data.pad_rows(tokens, self.table.prompt_tokens)
    hint_P = np.array([held is not None for held in held_P], np.float32)
    return prompts._replace(tokens_PxL=tokens_PxL, length_P=length_P, hint_P=hint_P)

  def prefixes(self, prompts: Prompts) -> list[np.ndarray]:
    """The token ids that each prompt's completions continue; empty for plain prompts."""
    hint_P = np.asarray(prompts.hint_P)
    rows = zip(prompts.tokens_PxL, prompts.length_P, prompts.index_P, hint_P, strict=True)
    return [
      np.asarray(tokens[len(self._before_prefix(int(i))) if hint else n : n])
      for tokens, n, i, hint in rows
    ]

  def update(
    self, batch: Batch, finished_P: np.ndarray, measures: Measures = NOT_MEASURED
  ) -> tuple[Batch, dict[str, float]]:
    """As `HintProvider.update`; all-wrong groups are held back, and those whose correction landed take its slot."""
    batch, metrics = super().update(batch, finished_P, measures)
    P, hint_P = len(finished_P), np.asarray(batch.prompts.hint_P)
    sound_PxG = np.asarray(measures.part_BxK)[:, self.part].reshape(P, -1)
    slots, held, corrected = [], 0, 0
    for p, sound_G in enumerate(sound_PxG):
      slot = group_batches.slots(batch, np.array([p]))
      if hint_P[p] > 0:
        slot, found = self._corrected(slot)
        corrected += found
      elif finished_P[p] and self._hold(slot, sound_G):
        slot, held = _empty(slot), held + 1
      slots.append(slot)
    metrics |= {'hint/held': held, 'hint/corrected': corrected}
    return group_batches.joined(slots), metrics

  def _hold(self, slot: Batch, sound_G: np.ndarray) -> bool:
    """Keeps a group for its correction; False where it has a right row, or none to correct."""
    index, length_G = int(slot.prompts.index_P[0]), np.asarray(slot.rollout.length_B)
    exists_G = length_G > 0
    if index in self.held or (np.asarray(slot.correct_B)[exists_G] > 0.5).any():
      return False
    least = self._correction.least
    usable_G = exists_G & (sound_G > least) & (sound_G < 1)
    if not usable_G.any():
      return False
    row = int(np.where(usable_G, sound_G, -1).argmax())
    start = self._tokens_before(slot.rollout.tokens_BxT[row, : length_G[row]], sound_G[row])
    fits = len(self._before_prefix(index)) + start <= self.table.prompt_tokens
    if not start or not fits:
      return False
    self.held[index] = Held(rollout_buffer.cut(slot), row, start)
    self._next.append(index)
    return True

  def _corrected(self, slot: Batch) -> tuple[Batch, bool]:
    """The held group of a slot's prompt, and whether a row is corrected: by the first right one of the slot."""
    held = self.held.pop(int(slot.prompts.index_P[0]), None)
    if held is None:
      return _empty(slot), False
    group = rollout_buffer.padded(held.group, slot)
    length_G, width = np.asarray(slot.rollout.length_B), slot.rollout.tokens_BxT.shape[1]
    right_G = (length_G > 0) & (np.asarray(slot.correct_B) > 0.5)
    right_G &= held.start + length_G <= width
    if not right_G.any():
      return group, False
    old, new = (
      group_batches.rows(batch, np.array([row]))
      for batch, row in ((group, held.row), (slot, right_G.argmax()))
    )
    return group_batches.with_row(
      group, held.row, group_batches.spliced(old, held.start, new)
    ), True

  def _tokens_before(self, token_ids: np.ndarray, share: float) -> int:
    """The most first tokens whose text is within this share of the text of all."""
    length = lambda n: len(self.tokenizer.decode(token_ids[:n].tolist()))  # noqa: E731
    most = round(float(share) * length(len(token_ids)))
    return bisect.bisect_right(range(len(token_ids)), most, key=length) - 1

  def _before_prefix(self, index: int) -> np.ndarray:
    """The token ids before the prefix: the prompt, with the demonstration of the data where there is one."""
    text = data.demonstration(self.table.rows[index]) if self._correction.guided else ''
    return self._encode(index, GUIDANCE, answer=text) if text else self.table.tokens[index]

  def _request(self, index: int, held: Held) -> np.ndarray:
    return np.concatenate([self._before_prefix(index), held.prefix]).astype(np.int32)

  @property
  def _correction(self) -> hint_rules.Correction:
    assert self.rule.correction is not None
    return self.rule.correction

  def state_dict(self) -> JsonObject:
    """The state for a checkpoint."""
    held = {
      str(index): x._asdict() | dict(group=group_batches.plain(x.group))
      for index, x in self.held.items()
    }
    return super().state_dict() | dict(held=held)

  def load_state_dict(self, state: JsonObject) -> None:
    """Restore from `state_dict`."""
    super().load_state_dict(state)
    self.held = {
      int(index): Held(group_batches.from_plain(x['group']), int(x['row']), int(x['start']))
      for index, x in state['held'].items()
    }


def part_column(settings: RewardsConfig, name: str) -> int:
  """The column of the reward of this name among those of config.rewards. Raises UserError where it finds no error."""
  names = rewards.names(settings)
  if name not in names[1:]:
    raise UserError(
      f'config.curriculum.hint.part={name!r} is no name in config.rewards.parts: {", ".join(names[1:]) or "none"}; '
      "add dict(fn='steps', combine='before_error', weight=0.0) with a judge, or name another one."
    )
  column = names.index(name)
  part = settings.parts[column - 1]
  if part.get('fn') == 'steps' and part.get('combine') != 'before_error':
    raise UserError(
      f'config.rewards.parts[{column - 1}].combine={part.get("combine", "mean")!r} names no place in a completion, and '
      "config.curriculum.hint.fn='corrected' needs the first wrong one; set it to 'before_error'."
    )
  return column


def _empty(slot: Batch) -> Batch:
  """The slot with rows of no tokens, so that they do not count."""
  length_B = np.zeros_like(np.asarray(slot.rollout.length_B))
  return slot._replace(rollout=slot.rollout._replace(length_B=length_B))
