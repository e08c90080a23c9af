"""Prompts whose next visit follows from the last one, such as a request to the policy and what it replied."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_llm import data
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.runner.hints import HintProvider
from jaxrl_llm.types import PLAIN, JsonObject, Prompts


class FollowUps(HintProvider):
  """Prompts that are sampled again as soon as there is room, as requests or otherwise changed."""

  def __init__(
    self,
    rule: hint_rules.Rule,
    table: data.PromptTable,
    tokenizer: Tokenizer,
    settings: DataConfig,
    seed: int,
  ):
    """As `HintProvider`."""
    super().__init__(rule, table, tokenizer, settings, seed)
    self._next: list[int] = []  # prompts whose next visit is changed and not named by `due` yet

  def due(self, most: int) -> np.ndarray:
    """At most `most` prompts to visit next, int32 [N], in the order in which they became due; each is named once."""
    chosen, self._next = self._next[:most], self._next[most:]
    return np.array(chosen, np.int32)

  @property
  def waiting(self) -> np.ndarray:
    """The prompts that `due` has not named yet, int32 [N]."""
    return np.array(self._next, np.int32)

  def add_hints(self, prompts: Prompts, step: int) -> Prompts:
    """Return the prompts of the visit; `context_P` says what each is, `hint_P` is 0 for the plain ones."""
    del step
    index_P = np.asarray(prompts.index_P).tolist()
    tokens, context_P = zip(*(self._prompt(index) for index in index_P), strict=True)
    tokens_PxL, length_P = data.pad_rows(tokens, self.table.prompt_tokens)
    context_P = np.array(context_P, np.int32)
    hint_P = (context_P != PLAIN).astype(np.float32)
    return prompts._replace(
      tokens_PxL=tokens_PxL, length_P=length_P, context_P=context_P, hint_P=hint_P
    )

  def _prompt(self, index: int) -> tuple[np.ndarray, int]:
    """Token ids of a prompt's next visit, and the value of `context_P` for it."""
    return self.table.tokens[index], PLAIN

  def _asked(self, index: int, instruction: str, **parts: str) -> np.ndarray | None:
    """Token ids of an instruction with the question and `parts`; None where it does not fit."""
    # A request is no question of the data: config.data.template does not apply.
    settings = dataclasses.replace(self.settings, template='{question}')
    row = data.with_question(self.table.rows[index], instruction, parts)
    token_ids = data.encode(row, settings, self.tokenizer)
    return token_ids if len(token_ids) <= self.table.prompt_tokens else None

  def state_dict(self) -> JsonObject:
    """The state for a checkpoint."""
    return super().state_dict() | dict(next=list(self._next))

  def load_state_dict(self, state: JsonObject) -> None:
    """Restore from `state_dict`."""
    super().load_state_dict(state)
    self._next = [int(index) for index in state['next']]
