"""From the recorded requests of an episode to a row: a completion, and observations between its turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.serving.episodes import Recorded


class Chain(NamedTuple):
  """Requests of which each prompt begins with all tokens of the one before."""

  # int32 [S]: the first prompt, then completions and what was put between them
  token_ids: np.ndarray
  number_S: np.ndarray  # int32: the turn in which a token was sampled, from 0 up; −1 for others
  logp_S: np.ndarray  # float32: behavior log-probs; 0 for tokens that were not sampled
  requests: int

  @property
  def first(self) -> int:
    """The number of tokens before the first sampled one."""
    return int(np.argmax(self.number_S >= 0))

  def extended(self, recorded: Recorded) -> Chain:
    """With one more request, whose prompt begins with these tokens."""
    added = recorded.prompt_ids[len(self.token_ids) :]
    masked, sampled = len(added), len(recorded.token_ids)
    return Chain(
      np.concatenate([self.token_ids, np.array(added + recorded.token_ids, np.int32)]),
      np.concatenate([self.number_S, np.repeat([-1, self.requests], [masked, sampled])]),
      np.concatenate([self.logp_S, np.zeros(masked), recorded.behavior_logps]).astype(np.float32),
      self.requests + 1,
    )


_EMPTY = Chain(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), 0)


def final_chain(completions: Sequence[Recorded]) -> Chain | None:
  """The chain of requests that leads to the last completion; None without one.

  Each completion follows the longest earlier one with whose tokens its prompt begins. Requests aside, and those before
  the harness edited its context, are on other chains.
  """
  chains: list[Chain] = []
  for recorded in completions:
    before = [_EMPTY, *(x for x in chains if _begins(recorded.prompt_ids, x.token_ids))]
    chains.append(max(before, key=lambda x: len(x.token_ids)).extended(recorded))
  return chains[-1] if chains else None


def shared_tokens(chains: Sequence[Chain], limit: int) -> int:
  """The number of first tokens, at most `limit`, that are equal in all chains and sampled in none."""
  shortest = min([limit, *(chain.first for chain in chains)])
  tokens = np.stack([chain.token_ids[:shortest] for chain in chains])
  equal = (tokens == tokens[0]).all(0)
  return shortest if equal.all() else int(np.argmin(equal))


def _begins(token_ids: Sequence[int], start: np.ndarray) -> bool:
  return len(start) <= len(token_ids) and np.array_equal(token_ids[: len(start)], start)
