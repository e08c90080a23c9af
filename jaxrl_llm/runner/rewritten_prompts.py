"""Prompts that the policy rewrites: requests in place of prompts, the questions in their replies, and their groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm import data, replay
from jaxrl_llm.curriculum.rewriting import Rewriting
from jaxrl_llm.runner.hints import HintProvider
from jaxrl_llm.types import PLAIN, REQUEST, Batch, JsonObject, Prompts, Rollout

_QUESTION = '{text}'


class RewrittenPrompts(HintProvider):
  """A hard or medium prompt's next visit asks for another question, the one after samples it, the third is plain again.

  The rollouts of a request are not graded and not learned: the first whose text holds a question that fits
  config.prompt_tokens is kept, and without one the next visit is plain. A rewritten question is graded by the answer
  of the data. arXiv:2509.25004 (CLPO).
  """

  def __init__(self, *arguments: Any, **settings: Any):
    """As `HintProvider`, for a rule with `rewriting`."""
    super().__init__(*arguments, **settings)
    self.questions: dict[int, tuple[int, str]] = {}  # prompt → what it is made from, and its text

  def add_hints(self, prompts: Prompts, step: int) -> Prompts:
    """Return the prompts, requests among them; `context_P` says what each is, `hint_P` is 0 for the plain ones."""
    index_P = np.asarray(prompts.index_P)
    due_P = self.hints.choose(index_P, step) > 0
    tokens, context_P = [], np.full(len(index_P), PLAIN, np.int32)
    for p, (index, due) in enumerate(zip(index_P.tolist(), due_P.tolist(), strict=True)):
      token_ids = self.table.tokens[index]
      if due:
        token_ids, context_P[p] = self._changed(index)
      tokens.append(token_ids)
    tokens_PxL, length_P = data.pad_rows(tokens, self.table.prompt_tokens)
    hint_P = (context_P != PLAIN).astype(np.float32)
    return prompts._replace(
      tokens_PxL=tokens_PxL, length_P=length_P, context_P=context_P, hint_P=hint_P
    )

  def receive(self, prompts: Prompts, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
    """Keep the questions of the replies to requests; return the rollout without these rows, and metrics."""
    asked_P, G = (
      np.asarray(prompts.context_P) == REQUEST,
      len(rollout.length_B) // len(prompts.index_P),
    )
    found = 0
    for p in np.flatnonzero(asked_P).tolist():
      rows = range(p * G, (p + 1) * G)
      index = int(prompts.index_P[p])
      question = self._question(index, rollout, [b for b in rows if rollout.length_B[b] > 0])
      if question or index not in self.questions:  # another slot may have found one
        self.questions[index] = self._kind(index), question
      found += bool(question)
    metrics = {'hint/requests': int(asked_P.sum()), 'hint/rewritten': found}
    return replay.blank(rollout, ~np.repeat(asked_P, G)), metrics

  def update(self, batch: Batch, finished_P: np.ndarray) -> tuple[Batch, dict[str, float]]:
    """As `HintProvider.update`; the question of a graded group has served."""
    graded_P = finished_P & (
      np.asarray(batch.rollout.length_B).reshape(len(finished_P), -1) > 0
    ).any(1)
    for index in np.asarray(batch.prompts.index_P)[graded_P].tolist():
      self.questions.pop(index, None)
    return super().update(batch, finished_P)

  def _changed(self, index: int) -> tuple[np.ndarray, int]:
    """Token ids of a prompt's rewritten question, or of the request for one, and which it is; else the plain prompt."""
    row, plain = self.table.rows[index], (self.table.tokens[index], PLAIN)
    if index in self.questions:
      kind, question = self.questions[index]
      return (self._encode(index, _QUESTION, text=question), kind) if question else plain
    if not row.answer:
      return plain
    instruction = self._rewriting.instruction(self._kind(index))
    # A request is no question of the data: config.data.template does not apply.
    settings = dataclasses.replace(self.settings, template='{question}')
    request = data.with_question(row, instruction, dict(answer=row.answer))
    token_ids = data.encode(request, settings, self.tokenizer)
    return (token_ids, REQUEST) if len(token_ids) <= self.table.prompt_tokens else plain

  def _question(self, index: int, rollout: Rollout, rows: list[int]) -> str:
    """The first question in these rows that fits as a prompt; '' without one."""
    for b in rows:
      reply = self.tokenizer.decode(rollout.tokens_BxT[b, : rollout.length_B[b]].tolist())
      question = self._rewriting.question_in(reply)
      if (
        question and len(self._encode(index, _QUESTION, text=question)) <= self.table.prompt_tokens
      ):
        return question
    return ''

  def _kind(self, index: int) -> int:
    """What a question that is asked for now is made from."""
    last = self.hints.visits[index][-1]
    return self._rewriting.kind(last.right, last.n)

  @property
  def _rewriting(self) -> Rewriting:
    assert self.rule.rewriting is not None
    return self.rule.rewriting

  def state_dict(self) -> JsonObject:
    """The state for a checkpoint."""
    questions = {str(index): list(x) for index, x in self.questions.items()}
    return super().state_dict() | dict(questions=questions)

  def load_state_dict(self, state: JsonObject) -> None:
    """Restore from `state_dict`."""
    super().load_state_dict(state)
    self.questions = {int(i): (int(kind), text) for i, (kind, text) in state['questions'].items()}
