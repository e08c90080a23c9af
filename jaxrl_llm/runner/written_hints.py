"""Hints that the policy writes: requests for them, groups that are sampled with them, and what is learned of both."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import numpy as np

from jaxrl_llm import data, replay
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.curriculum import hint_rules, hint_writing
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.replay import group_batches
from jaxrl_llm.replay.rollout_buffer import cut
from jaxrl_llm.runner.hints import NOT_MEASURED, HintProvider, Measures
from jaxrl_llm.types import PLAIN, REQUEST, Batch, JsonObject, Prompts, Rollout

_HINTED = '{question}\n\n{text}'


class Hints(NamedTuple):
  """The M hints for a prompt, from the replies to a request."""

  texts: tuple[str, ...]  # '' for one that is not sampled with
  lengths: tuple[int, ...]  # of the replies, in tokens
  rewards: tuple[float | None, ...]  # None: its group is not graded yet
  groups: dict[int, Batch]  # hint → its group, where that is mixed
  request: Batch | None = None  # the group of the request, one slot; None: not graded yet


class WrittenHints(HintProvider):
  """The steps after a group of wrong rows alone ask for hints, and sample a group with each.

  The rows of a request are learned once the rewards of its hints are known, and so is the group of the best hint: in
  slots whose own rows are not learned, those of requests and of hinted groups. arXiv:2604.00698 (HiLL).
  """

  def __init__(
    self,
    rule: hint_rules.Rule,
    table: data.PromptTable,
    tokenizer: Tokenizer,
    settings: DataConfig,
    seed: int,
  ):
    """As `HintProvider`, for a rule with `writing`."""
    super().__init__(rule, table, tokenizer, settings, seed)
    assert rule.writing is not None
    self._writing = rule.writing
    self.requests: dict[
      int, np.ndarray
    ] = {}  # prompt → token ids of its request, until the replies
    self.written: dict[int, Hints] = {}  # prompt → its hints, until all their rewards are known
    self.ready = replay.WaitingSlots()  # groups to learn
    self._next: list[tuple[int, int]] = []  # (prompt, REQUEST or number of the hint), a slot each
    self._due: list[tuple[int, int]] = []  # those of this step

  def due(self, most: int) -> np.ndarray:
    """At most `most` prompts to visit next, int32 [N], in the order in which they became due; once for each slot."""
    self._due, self._next = self._next[:most], self._next[most:]
    return np.array([index for index, _ in self._due], np.int32)

  @property
  def waiting(self) -> np.ndarray:
    """The prompts that `due` has not named yet, or not for all of their hints, int32 [N]."""
    return np.array(list(dict.fromkeys(index for index, _ in self._next)), np.int32)

  def add_hints(self, prompts: Prompts, step: int) -> Prompts:
    """Return the prompts with those that are due; `context_P` says what each is, `hint_P` is 0 for the plain ones."""
    del step
    due = collections.defaultdict(list)
    for index, context in self._due:
      due[index].append(context)
    index_P = np.asarray(prompts.index_P).tolist()
    context_P = np.array([due[i].pop(0) if due[i] else PLAIN for i in index_P], np.int32)
    tokens = [self._prompt(*pair) for pair in zip(index_P, context_P.tolist(), strict=True)]
    tokens_PxL, length_P = data.pad_rows(tokens, self.table.prompt_tokens)
    hint_P = (context_P != PLAIN).astype(np.float32)
    return prompts._replace(
      tokens_PxL=tokens_PxL, length_P=length_P, context_P=context_P, hint_P=hint_P
    )

  def receive(self, prompts: Prompts, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
    """Keep the hints in the replies to requests; return the rollout without these rows, and metrics."""
    asked_P = np.asarray(prompts.context_P) == REQUEST
    G = len(rollout.length_B) // len(asked_P)
    counts = collections.Counter({'requests': int(asked_P.sum()), 'unread': 0, 'leaks': 0})
    counts.update(too_long=0, tried=0)
    for p in np.flatnonzero(asked_P).tolist():
      index = int(prompts.index_P[p])
      if self.requests.pop(index, None) is None:
        continue
      rows = range(p * G, p * G + min(self._writing.hints, G))
      texts = [self._checked(index, self._reply(rollout, b), counts) for b in rows]
      numbers = [number for number, text in enumerate(texts) if text]
      if numbers:
        lengths = tuple(int(rollout.length_B[b]) for b in rows)
        rewards = tuple(None if text else self._writing.penalty for text in texts)
        self.written[index] = Hints(tuple(texts), lengths, rewards, groups={})
        self._next += [(index, number) for number in numbers]
    metrics: dict[str, float] = {f'hint/{name}': count for name, count in counts.items()}
    return replay.blank(rollout, ~np.repeat(asked_P, G)), metrics

  def update(
    self, batch: Batch, finished_P: np.ndarray, measures: Measures = NOT_MEASURED
  ) -> tuple[Batch, dict[str, float]]:
    """Ask for hints after groups of wrong rows alone, and reward those that were sampled with.

    The batch to learn from has no hinted group but those in `ready`, which fill slots without rows; metrics are of the
    hinted groups of this step, and `learned` counts the groups from `ready`.
    """
    batch = batch._replace(success_B=None)  # of the host alone, and not stored
    by_slot = lambda x: np.asarray(x).reshape(len(finished_P), -1)  # noqa: E731
    exists_PxG = by_slot(batch.rollout.length_B) > 0
    right_PxG = exists_PxG & (by_slot(batch.correct_B) > 0.5)
    right_P, n_P = right_PxG.sum(1), exists_PxG.sum(1)
    mixed_P = (right_P > 0) & (right_P < n_P)
    reliance_P = _mean_reliance(measures.reliance_B, right_PxG)
    context_P, rewards = np.asarray(batch.prompts.context_P), []
    for p in np.flatnonzero(finished_P).tolist():
      index, context = int(batch.prompts.index_P[p]), int(context_P[p])
      if context == REQUEST:
        self._store_request(index, group_batches.slots(batch, np.array([p])))
      elif context != PLAIN:
        rewards.append(self._writing.reward(int(right_P[p]), int(n_P[p]), reliance_P[p]))
        group = cut(group_batches.slots(batch, np.array([p]))) if mixed_P[p] else None
        self._store_hinted(index, context, rewards[-1], group)
      elif n_P[p] and not right_P[p]:
        self._ask(batch, p)
    hinted_P = finished_P & (context_P >= 0)
    metrics: dict[str, float] = {
      'hint/groups': int(hinted_P.sum()),
      'hint/right': float(right_P[hinted_P].sum() / max(n_P[hinted_P].sum(), 1)),
      'hint/mixed': int((hinted_P & mixed_P).sum()),
      'hint/reward': float(np.mean(rewards)) if rewards else 0.0,
    }
    batch, learned = self._with_ready(batch, np.repeat(context_P < 0, exists_PxG.shape[1]))
    return batch, metrics | {'hint/learned': learned, 'hint/waiting': len(self.ready)}

  def _prompt(self, index: int, context: int) -> np.ndarray:
    """Token ids of a prompt, of its request or of the prompt with a hint."""
    if context == PLAIN:
      return self.table.tokens[index]
    if context == REQUEST:
      return self.requests[index]
    return self._encode(index, _HINTED, text=self.written[index].texts[context])

  def _reply(self, rollout: Rollout, b: int) -> str:
    return self.tokenizer.decode(rollout.tokens_BxT[b, : rollout.length_B[b]].tolist())

  def _checked(self, index: int, reply: str, counts: collections.Counter) -> str:
    """The hint in a reply; '' without one, where it contains the answer, and where the prompt becomes too long."""
    text = self._writing.hint_in(reply)
    if not text:
      counts['unread'] += 1
    elif hint_writing.leaks(text, self.table.rows[index].answer):
      counts['leaks'] += 1
    elif len(self._encode(index, _HINTED, text=text)) > self.table.prompt_tokens:
      counts['too_long'] += 1
    else:
      counts['tried'] += 1
      return text
    return ''

  def _ask(self, batch: Batch, p: int) -> None:
    """Makes the request for hints due, with a failed row drawn by (seed, step, prompt)."""
    index, rollout = int(batch.prompts.index_P[p]), batch.rollout
    solution = data.demonstration(self.table.rows[index])
    if not solution or index in self.requests or index in self.written:
      return
    G = len(rollout.length_B) // len(batch.prompts.index_P)
    rows = p * G + np.flatnonzero(rollout.length_B[p * G : p * G + G])
    born = int(batch.prompts.born_P[p])
    b = np.random.default_rng((self.hints.seed, 10, born, index)).choice(rows)
    request = self._request(index, rollout.tokens_BxT[b, : rollout.length_B[b]], solution)
    if request is not None:
      self.requests[index] = request
      self._next.append((index, REQUEST))

  def _request(self, index: int, attempt_T: np.ndarray, solution: str) -> np.ndarray | None:
    """Token ids of the request; the attempt is cut in the middle to make it fit. None where it does not."""
    # A request is no question of the data: config.data.template does not apply.
    settings = dataclasses.replace(self.settings, template='{question}')
    room = len(attempt_T)
    while True:
      head = (room + 1) // 2
      kept_T = np.concatenate([attempt_T[:head], attempt_T[len(attempt_T) - room + head :]])
      parts = dict(attempt=self.tokenizer.decode(kept_T.tolist()), solution=solution)
      row = data.with_question(self.table.rows[index], self._writing.instruction, parts)
      token_ids = data.encode(row, settings, self.tokenizer)
      excess = len(token_ids) - self.table.prompt_tokens
      if excess <= 0:
        return token_ids
      if not room:
        return None
      room = max(room - excess, 0)

  def _store_request(self, index: int, group: Batch) -> None:
    """Keeps the group of a request, with the rows that are hints."""
    hints = self.written.get(index)
    if hints is None or hints.request is not None:
      return
    length_G = np.zeros_like(group.rollout.length_B)
    length_G[: len(hints.lengths)] = hints.lengths
    group = group._replace(rollout=group.rollout._replace(length_B=length_G))
    self.written[index] = hints._replace(request=cut(group))

  def _store_hinted(self, index: int, number: int, reward: float, group: Batch | None) -> None:
    """Keeps the reward of a hint, and its group where that is mixed."""
    hints = self.written.get(index)
    if hints is None:
      return
    rewards = list(hints.rewards)
    rewards[number] = reward
    groups = hints.groups if group is None else hints.groups | {number: group}
    self.written[index] = hints._replace(rewards=tuple(rewards), groups=groups)
    if None not in rewards:
      self._finish(self.written.pop(index))

  def _finish(self, hints: Hints) -> None:
    """Makes ready the group of the best hint, and that of the request where the rewards of hints differ."""
    rewards = [0.0 if reward is None else reward for reward in hints.rewards]
    mixed = [number in hints.groups for number in range(len(rewards))]
    chosen = hint_writing.best(rewards, mixed)
    if chosen is not None:
      self.ready.groups.append(hints.groups[chosen])
    request = hints.request
    if request is not None and max(rewards) - min(rewards) > group_batches.SAME:
      reward_G = np.zeros_like(np.asarray(request.reward_B))
      reward_G[: len(rewards)] = rewards
      self.ready.groups.append(request._replace(reward_B=reward_G))

  def _with_ready(self, batch: Batch, keep_B: np.ndarray) -> tuple[Batch, int]:
    """The batch with the rows to keep, and groups from `ready` in slots without any; and their number."""
    waiting = len(self.ready)
    batch = self.ready.fill(batch._replace(rollout=replay.blank(batch.rollout, keep_B)), {})
    return batch, waiting - len(self.ready)

  def state_dict(self) -> JsonObject:
    """The state for a checkpoint."""
    return super().state_dict() | dict(
      requests={str(index): tokens for index, tokens in self.requests.items()},
      written={str(index): _plain(hints) for index, hints in self.written.items()},
      ready=self.ready.state_dict(),
      next=[list(pair) for pair in self._next],
    )

  def load_state_dict(self, state: JsonObject) -> None:
    """Restore from `state_dict`."""
    super().load_state_dict(state)
    self.requests = {int(i): np.asarray(x, np.int32) for i, x in state['requests'].items()}
    self.written = {int(index): _hints(fields) for index, fields in state['written'].items()}
    self.ready.load_state_dict(state['ready'])
    self._next = [(int(index), int(context)) for index, context in state['next']]
    self._due = []


def _mean_reliance(reliance_B: np.ndarray | None, right_PxG: np.ndarray) -> list[float | None]:
  """The mean over the right rows of each slot; None without one, and where reliance is unknown."""
  if reliance_B is None:
    return [None] * len(right_PxG)
  pairs = zip(np.asarray(reliance_B).reshape(right_PxG.shape), right_PxG, strict=True)
  return [float(x_G[right_G].mean()) if right_G.any() else None for x_G, right_G in pairs]


def _plain(hints: Hints) -> JsonObject:
  """Hints as a dict of lists and arrays."""
  return dict(
    texts=list(hints.texts),
    lengths=list(hints.lengths),
    rewards=list(hints.rewards),
    request=None if hints.request is None else group_batches.plain(hints.request),
    groups={str(number): group_batches.plain(group) for number, group in hints.groups.items()},
  )


def _hints(fields: JsonObject) -> Hints:
  """The inverse of `_plain`."""
  request, groups = fields['request'], fields['groups'].items()
  return Hints(
    *(tuple(fields[name]) for name in ('texts', 'lengths', 'rewards')),
    request=None if request is None else group_batches.from_plain(request),
    groups={int(number): group_batches.from_plain(group) for number, group in groups},
  )
