"""Episodes of a harness at the endpoint: each has an API key, by which its completions are recorded."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.serving.api import ApiError, ApiRequest
from jaxrl_llm.serving.completion import Completion
from jaxrl_llm.types import JsonValue

_STREAM = 11  # of the noise, apart from those of other parts of a run


class Recorded(NamedTuple):
  """A completion as it was sampled."""

  prompt_ids: tuple[int, ...]
  token_ids: tuple[int, ...]
  behavior_logps: tuple[float, ...]
  finish_reason: str  # as OpenAI's API writes it
  text: str  # of the prompt as it was sent, and of the completion with its special tokens

  @property
  def ids(self) -> tuple[int, ...]:
    """The token ids of prompt and completion."""
    return self.prompt_ids + self.token_ids


class Sampler(NamedTuple):
  """How all completions of an episode are sampled, whatever its requests say."""

  noise: tuple[int, ...]  # numbers that identify the episode among all of a run
  temperature: float
  max_requests: int


class Episode:
  """Requests with one API key. The thread of the HTTP server alone changes it while it is open."""

  def __init__(self, sampler: Sampler):
    self._sampler = sampler
    self.requests = 0  # that began
    self.overridden = 0  # requests that asked for another temperature or top_p
    self.completions: list[Recorded] = []  # in the order in which they ended
    self.reward: float | None = None  # the newest that was posted
    self._texts: dict[tuple[int, ...], str] = {}  # of prompts, by their token ids

  def begin(self, request: ApiRequest) -> ApiRequest:
    """The request with the episode's noise and temperature. Raises ApiError behind its last request."""
    if self.requests >= self._sampler.max_requests:
      raise ApiError(
        f'this episode may make {self._sampler.max_requests} requests (config.environment.turns).'
      )
    noise = (*self._sampler.noise, _STREAM, self.requests)
    seed = int(np.random.SeedSequence(noise).generate_state(1)[0])
    sampling = request.sampling
    wanted = sampling.temperature, sampling.top_p
    self.requests += 1
    self.overridden += wanted != (self._sampler.temperature, 1.0)
    changed = dict(temperature=self._sampler.temperature, top_p=1.0, seed=seed)
    return request._replace(sampling=sampling._replace(**changed))

  def encode(self, text: str, tokenizer: Tokenizer) -> Sequence[int]:
    """Token ids of a prompt. Sampled ids are kept where the text goes on from a recorded one.

    Text that is encoded again may have other ids than those that were sampled. A sampled end token is kept, too, where
    the text goes on without it: not every chat template writes one behind an answer.
    """
    known = [(x.text, x.ids) for x in reversed(self.completions)]
    for known_text, ids in known[:]:
      if ids[-1] in tokenizer.end_ids:
        known.append((known_text.removesuffix(tokenizer.decode([ids[-1]], False)), ids))
    begun = [('', ()), *((t, ids) for t, ids in known if text.startswith(t))]
    longest, ids = max(begun, key=lambda pair: len(pair[0]))
    token_ids = (*ids, *tokenizer.encode(text[len(longest) :]))
    self._texts[token_ids] = text
    return token_ids

  def record(self, completions: Sequence[Completion], tokenizer: Tokenizer) -> None:
    """Add the completions of a request that ended."""
    for completion in completions:
      prompt_ids = tuple(completion.prompt_ids)
      token_ids = tuple(token.id for token in completion.tokens)
      logps = tuple(token.behavior_logp for token in completion.tokens)
      # Decoded behind its prompt: some decoders drop a space at the beginning.
      decoded = tokenizer.decode(list(prompt_ids), False)
      sampled = tokenizer.decode([*prompt_ids, *token_ids], False)[len(decoded) :]
      text = self._texts.get(prompt_ids, decoded) + sampled
      reason = completion.finish_reason or ''
      self.completions.append(Recorded(prompt_ids, token_ids, logps, reason, text))

  def set_reward(self, value: JsonValue) -> None:
    """Take a posted reward; None takes an earlier one back. Raises ApiError where it is no finite number."""
    if value is None:
      self.reward = None
      return
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
      raise ApiError(
        f"'reward' must be a finite number or null, not {str(value)[:60]!r}.", 'reward'
      )
    self.reward = float(value)


class Episodes:
  """The open episodes by their API keys."""

  def __init__(self):
    self._by_key: dict[str, Episode] = {}

  def open(self, sampler: Sampler) -> tuple[str, Episode]:
    """A new episode and its key."""
    key, episode = f'sk-{secrets.token_urlsafe(24)}', Episode(sampler)
    self._by_key[key] = episode
    return key, episode

  def close(self) -> None:
    """Refuse the keys of all episodes from now on."""
    self._by_key = {}

  def find(self, key: str) -> Episode:
    """The open episode of a key. Raises ApiError for another key."""
    episode = self._by_key.get(key)
    if episode is None:
      raise ApiError(
        'the API key is of no open episode: use OPENAI_API_KEY as the harness got it, and end before '
        'config.environment.deadline_s.',
        status=401,
        code='invalid_api_key',
      )
    return episode
