"""Prompts that are told a part of a known answer: what they are given, how it is learned, and what came of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm import curriculum, data, replay
from jaxrl_llm.types import Batch, Prompts

_EXEMPLAR = '{other}\n{answer}\n\n{question}'
_STRATEGY = '{question}\n\n{text}'
_GUIDANCE = '{question}\n\nThe answer begins with: {answer}'


class Aid:
  """What the rule of `config.curriculum.hint` says, done: prompts in, prompts with a part of an answer out."""

  def __init__(
    self, rule: curriculum.hint_rules.Rule, table: Any, tokenizer: Any, settings: Any, seed: int
  ):
    """`settings` is config.data. Source: none."""
    self.rule, self.table, self.tokenizer, self.settings = rule, table, tokenizer, settings
    self.hints, self.answers = curriculum.Hints(rule, seed), replay.Answers()
    self.kind_N = data.kinds(table.rows)

  def give(self, prompts: Prompts, step: int) -> Prompts:
    """The prompts with their hints, and in `hint_P` the share of an answer that each was shown.

    A prompt without a known answer, or without room for a hint, stays plain. Source: by the rule.
    """
    if self.rule.texts:
      return self._nudged(prompts, step)
    index_P = np.asarray(prompts.index_P)
    share_P = self.hints.choose(index_P, step)
    tokens, given_P = [], np.zeros(len(index_P), np.float32)
    for p, (index, share) in enumerate(zip(index_P.tolist(), share_P.tolist(), strict=True)):
      told = self._told(index, share, step) if share > 0 else None
      if told is not None and len(told) <= self.table.prompt_tokens:
        given_P[p] = share
      tokens.append(told if given_P[p] else self.table.tokens[index])
    tokens_PxL, length_P = data.padded(tokens, self.table.prompt_tokens)
    return prompts._replace(tokens_PxL=tokens_PxL, length_P=length_P, hint_P=given_P)

  def _nudged(self, prompts: Prompts, step: int) -> Prompts:
    """A strategy for each slot of a prompt, drawn by (seed, step, prompt, slot); none where there is no room."""
    index_P = np.asarray(prompts.index_P)
    part_P = np.zeros_like(index_P) if prompts.part_P is None else prompts.part_P
    tokens, context_P = [], np.full(len(index_P), -1, np.int32)
    for p, (index, part) in enumerate(zip(index_P.tolist(), part_P.tolist(), strict=True)):
      random = np.random.default_rng((self.hints.seed, 6, step, index, part))
      told, number = self.table.tokens[index], part % len(self.rule.texts)
      if random.random() >= self.rule.drop:
        longer = self._encoded(index, _STRATEGY, text=self.rule.texts[number])
        if len(longer) <= self.table.prompt_tokens:
          told, context_P[p] = longer, number
      tokens.append(told)
    tokens_PxL, length_P = data.padded(tokens, self.table.prompt_tokens)
    hint_P = (context_P >= 0).astype(np.float32)
    return prompts._replace(
      tokens_PxL=tokens_PxL, length_P=length_P, context_P=context_P, hint_P=hint_P
    )

  def aided(self, step: int) -> curriculum.Aided:
    """What the curriculum is to expect of prompts that get a hint: Beta(1, 1) and their last visit with one.

    Source: none.
    """
    index, counts = self.hints.evidence(step)
    return curriculum.Aided(index, *(1 + counts).T)

  def begun(self, prompts: Prompts) -> list[np.ndarray]:
    """The tokens that each prompt's reply began with, before anything was sampled. Source: none."""
    if self.rule.form != curriculum.hint_rules.PREFIX:
      return [np.zeros(0, np.int32)] * len(prompts.index_P)
    told = zip(prompts.tokens_PxL, prompts.length_P, prompts.index_P, strict=True)
    return [np.asarray(x[len(self.table.tokens[i]) : n]) for x, n, i in told]

  def learn(self, batch: Batch, whole_P: np.ndarray) -> tuple[Batch, dict[str, float]]:
    """What the update gets: the hints taken away where the rule says so. Remembers answers and what came of hints.

    Source: by the rule.
    """
    prompts, share_P = batch.prompts, np.asarray(batch.prompts.hint_P)
    self.answers.keep(batch, self.begun(prompts))
    by_slot = lambda x: np.asarray(x).reshape(len(share_P), -1)  # noqa: E731
    n_P = (by_slot(batch.rollout.length_B) > 0).sum(1)
    right_P = (by_slot(batch.correct_B) > 0.5).sum(1)
    seen_P = whole_P & (n_P > 0)
    told = (np.asarray(prompts.index_P), share_P, right_P, n_P)
    self.hints.observe(*(x[seen_P] for x in told))
    hinted_P = seen_P & (share_P > 0)
    row = {
      'hint/groups': int(hinted_P.sum()),
      'hint/share': float(share_P[hinted_P].mean()) if hinted_P.any() else 0.0,
      'hint/right': float(right_P[hinted_P].sum() / max(n_P[hinted_P].sum(), 1)),
    }
    if self.rule.plain:
      plain = self.table.prompts(prompts.index_P)
      prompts = prompts._replace(tokens_PxL=plain.tokens_PxL, length_P=plain.length_P)
    return batch._replace(prompts=prompts), row

  def _told(self, index: int, share: float, step: int) -> np.ndarray | None:
    """A prompt's tokens with its hint; None where no answer is known."""
    if self.rule.exemplars:
      return self._after_exemplar(index, step)
    answer = self._answer(index)
    if answer is None:
      return None
    shown = answer[: max(1, int(share * len(answer)))]
    if self.rule.form == curriculum.hint_rules.PREFIX:
      return np.concatenate([self.table.tokens[index], shown]).astype(np.int32)
    text = self.tokenizer.decode(shown.tolist())
    return self._encoded(index, _GUIDANCE, answer=text)

  def _answer(self, index: int) -> np.ndarray | None:
    """The run's own right reply, else what the data shows of one."""
    if index in self.answers.held:
      return self.answers.held[index]
    text = data.demonstration(self.table.rows[index])
    return np.asarray(self.tokenizer.encode(text), np.int32) if text else None

  def _after_exemplar(self, index: int, step: int) -> np.ndarray | None:
    """Behind a solved question of the same kind, drawn by (seed, step, prompt)."""
    alike = [i for i in self.answers.held if i != index and self.kind_N[i] == self.kind_N[index]]
    alike = [i for i in sorted(alike) if self.table.rows[i].question]
    if not alike:
      return None
    random = np.random.default_rng((self.hints.seed, 5, step, index))
    other = alike[random.integers(len(alike))]
    answer = self.tokenizer.decode(self.answers.held[other].tolist())
    return self._encoded(index, _EXEMPLAR, answer=answer, other=self.table.rows[other].question)

  def _encoded(self, index: int, template: str, **parts: str) -> np.ndarray:
    return data.encode(
      data.with_question(self.table.rows[index], template, parts), self.settings, self.tokenizer
    )

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    return dict(hints=self.hints.state_dict(), answers=self.answers.state_dict())

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    self.hints.load_state_dict(state['hints'])
    self.answers.load_state_dict(state['answers'])
