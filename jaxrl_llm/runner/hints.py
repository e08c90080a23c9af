"""Hinted prompts: adds part of a known answer or a strategy to a prompt, and records the outcome."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import curriculum, data, replay
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.types import Array, Batch, JsonObject, Prompts, Rollout

_EXEMPLAR = '{other}\n{answer}\n\n{question}'
_STRATEGY = '{question}\n\n{text}'
GUIDANCE = '{question}\n\nThe answer begins with: {answer}'


class Measures(NamedTuple):
  """What a step measured besides its batch, for the providers that read it; None: not measured."""

  part_BxK: Array = None  # each reward of the rows
  reliance_B: np.ndarray | None = None  # of `learner.hint_reliance`


NOT_MEASURED = Measures()


class HintProvider:
  """Applies the rule of `config.curriculum.hint` to the prompts of a step."""

  def __init__(
    self,
    rule: curriculum.hint_rules.Rule,
    table: data.PromptTable,
    tokenizer: Any,
    settings: DataConfig,
    seed: int,
  ):
    """`settings` is config.data: how a changed question is rendered."""
    self.rule, self.table, self.tokenizer, self.settings = rule, table, tokenizer, settings
    self.hints, self.answers = curriculum.HintScheduler(rule, seed), replay.KnownAnswers()
    self.kind_N = data.kinds(table.rows, table.file_tokens_N)

  def add_hints(self, prompts: Prompts, step: int) -> Prompts:
    """Return the prompts with their hints; `hint_P` is the share of the answer that each one contains.

    A prompt stays plain without a known answer, and where the hint does not fit config.prompt_tokens.
    """
    if self.rule.texts or self.rule.by_slot:
      return self._add_by_slot(prompts, step)
    index_P = np.asarray(prompts.index_P)
    share_P = self.hints.choose(index_P, step)
    tokens, hint_P = [], np.zeros(len(index_P), np.float32)
    for p, (index, share) in enumerate(zip(index_P.tolist(), share_P.tolist(), strict=True)):
      token_ids = self.table.tokens[index]
      hinted = self._hinted_tokens(index, share, step) if share > 0 else None
      if hinted is not None and len(hinted) <= self.table.prompt_tokens:
        token_ids, hint_P[p] = hinted, share
      tokens.append(token_ids)
    tokens_PxL, length_P = data.pad_rows(tokens, self.table.prompt_tokens)
    return prompts._replace(tokens_PxL=tokens_PxL, length_P=length_P, hint_P=hint_P)

  def _add_by_slot(self, prompts: Prompts, step: int) -> Prompts:
    """Adds to each slot of a prompt its strategy or its stage, where it fits."""
    index_P = np.asarray(prompts.index_P)
    part_P = np.zeros_like(index_P) if prompts.part_P is None else prompts.part_P
    tokens, context_P, hint_P = [], np.zeros(len(index_P), np.int32), np.zeros(len(index_P))
    add = self._with_strategy if self.rule.texts else self._with_stage
    for p, (index, part) in enumerate(zip(index_P.tolist(), part_P.tolist(), strict=True)):
      token_ids, hint_P[p], context_P[p] = add(index, part, step)
      tokens.append(token_ids)
    tokens_PxL, length_P = data.pad_rows(tokens, self.table.prompt_tokens)
    return prompts._replace(
      tokens_PxL=tokens_PxL,
      length_P=length_P,
      context_P=context_P,
      hint_P=hint_P.astype(np.float32),
    )

  def _with_strategy(self, index: int, part: int, step: int) -> tuple[np.ndarray, float, int]:
    """(token ids, 1.0, number of the strategy), drawn by (seed, step, prompt, slot); (plain, 0.0, −1) without one."""
    random = np.random.default_rng((self.hints.seed, 6, step, index, part))
    number = part % len(self.rule.texts)
    if random.random() >= self.rule.drop:
      hinted = self._encode(index, _STRATEGY, text=self.rule.texts[number])
      if len(hinted) <= self.table.prompt_tokens:
        return hinted, 1.0, number
    return self.table.tokens[index], 0.0, -1

  def _with_stage(self, index: int, part: int, step: int) -> tuple[np.ndarray, float, int]:
    """(token ids, share of the answer, number of the stage); (plain, 0.0, 0) without an answer or room."""
    number = part % len(self.rule.by_slot)
    share = self.rule.by_slot[number]
    hinted = self._hinted_tokens(index, share, step) if share else None
    if hinted is not None and len(hinted) <= self.table.prompt_tokens:
      return hinted, share, number
    return self.table.tokens[index], 0.0, 0

  def posterior(self, step: int) -> curriculum.HintedPosteriors:
    """Success rates of the prompts that get a hint in this step: Beta(1, 1) and their last hinted visit."""
    index, counts = self.hints.evidence(step)
    return curriculum.HintedPosteriors(index, *(1 + counts).T)

  def prefixes(self, prompts: Prompts) -> list[np.ndarray]:
    """The token ids of each prompt's hint that are part of its completion; empty for other forms of hints."""
    if self.rule.form != curriculum.hint_rules.PREFIX:
      return [np.zeros(0, np.int32)] * len(prompts.index_P)
    rows = zip(prompts.tokens_PxL, prompts.length_P, prompts.index_P, strict=True)
    return [np.asarray(tokens[len(self.table.tokens[i]) : n]) for tokens, n, i in rows]

  def due(self, most: int) -> np.ndarray:
    """At most `most` prompts to visit next, int32 [N]; here the curriculum chooses all."""
    del most
    return self.waiting

  @property
  def waiting(self) -> np.ndarray:
    """The prompts that are still to be visited next, int32 [N]."""
    return np.zeros(0, np.int32)

  def receive(self, prompts: Prompts, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
    """What is learned of a sampled step before it is graded: (rollout to grade, metrics); here it is unchanged."""
    return rollout, {}

  def update(
    self, batch: Batch, finished_P: np.ndarray, measures: Measures = NOT_MEASURED
  ) -> tuple[Batch, dict[str, float]]:
    """Record answers and outcomes; return the batch to learn from and metrics.

    Hints are removed from the prompts of the batch where the rule is `plain`, and hinted groups have no rows where
    they are not `learned`. `finished_P` [P] marks finished groups.
    """
    del measures
    prompts, share_P = batch.prompts, np.asarray(batch.prompts.hint_P)
    self.answers.keep(batch, self.prefixes(prompts))
    by_slot = lambda x: np.asarray(x).reshape(len(share_P), -1)  # noqa: E731
    n_P = (by_slot(batch.rollout.length_B) > 0).sum(1)
    correct_P = (by_slot(batch.correct_B) > 0.5).sum(1)
    graded_P = finished_P & (n_P > 0)
    outcomes = (np.asarray(prompts.index_P), share_P, correct_P, n_P)
    self.hints.observe(*(x[graded_P] for x in outcomes))
    hinted_P = graded_P & (share_P > 0)
    metrics = {
      'hint/groups': int(hinted_P.sum()),
      'hint/share': float(share_P[hinted_P].mean()) if hinted_P.any() else 0.0,
      'hint/right': float(correct_P[hinted_P].sum() / max(n_P[hinted_P].sum(), 1)),
    }
    if self.rule.plain:
      plain = self.table.prompts(prompts.index_P)
      prompts = prompts._replace(tokens_PxL=plain.tokens_PxL, length_P=plain.length_P)
    rollout = batch.rollout
    if not self.rule.learned:
      G = len(rollout.length_B) // len(share_P)
      rollout = replay.blank(rollout, np.repeat(share_P == 0, G))
    return batch._replace(prompts=prompts, rollout=rollout), metrics

  def _hinted_tokens(self, index: int, share: float, step: int) -> np.ndarray | None:
    """A prompt's token ids with its hint; None without a known answer."""
    if self.rule.exemplars:
      return self._after_exemplar(index, step)
    answer = self._answer(index)
    if answer is None:
      return None
    hint = answer[: max(1, int(share * len(answer)))]
    if self.rule.form == curriculum.hint_rules.PREFIX:
      return np.concatenate([self.table.tokens[index], hint]).astype(np.int32)
    return self._encode(index, GUIDANCE, answer=self.tokenizer.decode(hint.tolist()))

  def _answer(self, index: int) -> np.ndarray | None:
    """Token ids of a correct completion of this run, else of the demonstration in the data."""
    if index in self.answers.tokens:
      return self.answers.tokens[index]
    text = data.demonstration(self.table.rows[index])
    return np.asarray(self.tokenizer.encode(text), np.int32) if text else None

  def _after_exemplar(self, index: int, step: int) -> np.ndarray | None:
    """The prompt behind a solved question of the same kind, drawn by (seed, step, prompt)."""
    solved = [i for i in self.answers.tokens if i != index and self.kind_N[i] == self.kind_N[index]]
    solved = [i for i in sorted(solved) if self.table.rows[i].question]
    if not solved:
      return None
    random = np.random.default_rng((self.hints.seed, 5, step, index))
    other = solved[random.integers(len(solved))]
    answer = self.tokenizer.decode(self.answers.tokens[other].tolist())
    return self._encode(index, _EXEMPLAR, answer=answer, other=self.table.rows[other].question)

  def _encode(self, index: int, template: str, **parts: str) -> np.ndarray:
    row = data.with_question(self.table.rows[index], template, parts)
    return data.encode(row, self.settings, self.tokenizer)

  def state_dict(self) -> JsonObject:
    """The state for a checkpoint."""
    return dict(hints=self.hints.state_dict(), answers=self.answers.state_dict())

  def load_state_dict(self, state: JsonObject) -> None:
    """Restore from `state_dict`."""
    self.hints.load_state_dict(state['hints'])
    self.answers.load_state_dict(state['answers'])
