"""Prompts that the policy rewrites: requests in place of prompts, the questions in their replies, and their groups."""

from __future__ import annotations

import numpy as np

from jaxrl_llm import data, replay
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.curriculum.rewriting import Rewriting
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.runner.follow_ups import FollowUps
from jaxrl_llm.runner.hints import NOT_MEASURED, Measures
from jaxrl_llm.types import PLAIN, REQUEST, Batch, JsonObject, Prompts, Rollout

_QUESTION = '{text}'


class RewrittenPrompts(FollowUps):
  """The step after a hard or medium group asks for another question, and the step after that samples it.

  The rollouts of a request are neither graded nor learned. The first that holds a question which fits
  config.prompt_tokens is kept; without one the prompt is plain again. A rewritten question is graded by the answer of
  the data, and serves for one group. arXiv:2509.25004 (CLPO).
  """

  def __init__(
    self,
    rule: hint_rules.Rule,
    table: data.PromptTable,
    tokenizer: Tokenizer,
    settings: DataConfig,
    seed: int,
  ):
    """As `HintProvider`, for a rule with `rewriting`."""
    super().__init__(rule, table, tokenizer, settings, seed)
    # Prompt → what its question is made from, and the question; '' is asked for first.
    self.questions: dict[int, tuple[int, str]] = {}

  def receive(self, prompts: Prompts, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
    """Keep the questions of the replies to requests; return the rollout without these rows, and metrics."""
    asked_P = np.asarray(prompts.context_P) == REQUEST
    G, found = len(rollout.length_B) // len(asked_P), 0
    for p in np.flatnonzero(asked_P).tolist():
      index = int(prompts.index_P[p])
      kind, _ = self.questions.pop(index, (PLAIN, ''))
      question = self._question(index, rollout, range(p * G, (p + 1) * G))
      if kind != PLAIN and question:
        self.questions[index] = kind, question
        self._next.append(index)
        found += 1
    metrics: dict[str, float] = {'hint/requests': int(asked_P.sum()), 'hint/rewritten': found}
    return replay.blank(rollout, ~np.repeat(asked_P, G)), metrics

  def update(
    self, batch: Batch, finished_P: np.ndarray, measures: Measures = NOT_MEASURED
  ) -> tuple[Batch, dict[str, float]]:
    """As `HintProvider.update`; a plain group of a hard or medium prompt is followed by a request."""
    by_slot = lambda x: np.asarray(x).reshape(len(finished_P), -1)  # noqa: E731
    exists_PxG = by_slot(batch.rollout.length_B) > 0
    right_P = (by_slot(batch.correct_B) > 0.5).sum(1)
    n_P, context_P = exists_PxG.sum(1), np.asarray(batch.prompts.context_P)
    for p in np.flatnonzero(finished_P & (n_P > 0)).tolist():
      index = int(batch.prompts.index_P[p])
      self.questions.pop(index, None)
      kind = self._rewriting.kind(int(right_P[p]), int(n_P[p]))
      if context_P[p] == PLAIN and kind != PLAIN and self._request(index, kind) is not None:
        self.questions[index] = kind, ''
        self._next.append(index)
    return super().update(batch, finished_P, measures)

  def _prompt(self, index: int) -> tuple[np.ndarray, int]:
    """Token ids of a prompt, of its rewritten question or of the request for one; and which of them."""
    kind, question = self.questions.get(index, (PLAIN, ''))
    if question:
      return self._encode(index, _QUESTION, text=question), kind
    request = None if kind == PLAIN else self._request(index, kind)
    return (self.table.tokens[index], PLAIN) if request is None else (request, REQUEST)

  def _request(self, index: int, kind: int) -> np.ndarray | None:
    """Token ids of the request; None where the data has no answer, and where it does not fit."""
    answer = self.table.rows[index].answer
    return self._asked(index, self._rewriting.instruction(kind), answer=answer) if answer else None

  def _question(self, index: int, rollout: Rollout, rows: range) -> str:
    """The first question in these rows that fits as a prompt; '' without one."""
    for b in rows:
      reply = self.tokenizer.decode(rollout.tokens_BxT[b, : rollout.length_B[b]].tolist())
      question = self._rewriting.question_in(reply)
      if (
        question and len(self._encode(index, _QUESTION, text=question)) <= self.table.prompt_tokens
      ):
        return question
    return ''

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
