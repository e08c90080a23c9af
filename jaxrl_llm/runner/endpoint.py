"""Rollouts of a user's agent (config.environment.fn=endpoint): it asks for completions, which become the rows.

A step serves its weights at an OpenAI-compatible endpoint on loopback and runs the harness once for each row, in worker
processes. The requests of an episode are told apart by an API key of its own. A row is the chain of requests that leads
to the last one: sampled tokens as recorded, and between them what the harness added, which is masked out of the loss.
The prompt of a group is what its rows have in common; what follows in one of them is masked in that row.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxrl_llm import data, environments, rewards
from jaxrl_llm.config.schema import Config
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, precision
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.runner import multi_turn, request_chains
from jaxrl_llm.runner.request_chains import Chain
from jaxrl_llm.serving import server
from jaxrl_llm.serving.call import Limits
from jaxrl_llm.serving.engine import LENGTH
from jaxrl_llm.serving.episodes import Episode, Sampler
from jaxrl_llm.serving.loopback import LoopbackServer
from jaxrl_llm.serving.programs import EngineSettings
from jaxrl_llm.types import STOPPED, TRUNCATED, Model, Params, Prompts, Rollout, Row

if TYPE_CHECKING:
  from jaxrl_llm.runner.context import RunContext

_APART = 'its first prompt begins with another token than that of another rollout of the group'
_SILENT = (
  'the harness ended without a completion: is its client given OPENAI_BASE_URL and OPENAI_API_KEY?'
)
_WINDOW_TOKENS = 8  # of each slot between two admissions
_SLOTS_ON_CPU, _SLOTS = 8, 64
# requests that may wait: a harness that is refused would ask again, and get other noise
_QUEUE = 4096
_COUNTED = ('requests', 'observation_tokens', 'dropped_requests', 'split', 'cut', 'overridden')
Counts = dict[str, float]


class HarnessEpisodes(multi_turn.EpisodeRewards):
  """Episodes of the harness that config.environment names."""

  def __init__(self, config: Config, model: Model):
    """Raises UserError for bad settings, and without the libraries of the server."""
    server.check_libraries("config.environment.fn='endpoint'")
    super().__init__(config, model.tokenizer)
    self.environments = environments.WorkerPool(config.environment)
    self._config, self._model = config, model
    self._server: LoopbackServer | None = None
    self._prompts: Prompts | None = None  # of the newest rollout

  def close(self) -> None:
    """End the worker processes and the server."""
    self.environments.close()
    if self._server is not None:
      self._server.close()
      self._server = None

  def begin_step(self, step: int) -> None:
    """Nothing lives from one step to the next."""

  def open(self, prompts: Prompts, rows: Sequence[Row], width: int, rollouts: int) -> Prompts:
    """The prompts as they are: the harness writes its own."""
    return prompts

  def prompts_of(self, prompts: Prompts) -> Prompts:
    """The prompts of the newest rollout, as the harness wrote them."""
    return prompts if self._prompts is None else self._prompts

  def sample(
    self, spec: StepSpec, params: Params, prompts: Prompts, rows: Sequence[Row], version: int
  ) -> tuple[Rollout, dict[str, float]]:
    """Run all episodes of a step with `params`; host arrays and metrics. `version`: optimizer steps they have taken."""
    keys = [key for group in multi_turn.keys_of(prompts, self._config.rollouts) for key in group]
    loopback = self._started(params)
    opened = [loopback.episodes.open(self._sampler(key)) for key in keys]
    url = loopback.base_url
    texts = [json.dumps(dict(base_url=url, api_key=api_key)) for api_key, _ in opened]
    seeded = [pair for pair in self.seeded(prompts, rows) for _ in range(self._config.rollouts)]
    requests = [
      environments.TurnRequest(key, *pair, []) for key, pair in zip(keys, seeded, strict=True)
    ]
    self.message = ''
    with loopback.serving(params):
      begun = self.environments.run(requests)
      ready = [b for b, result in enumerate(begun) if result.outcome == rewards.OK]
      runs = [requests[b]._replace(texts=[texts[b]]) for b in ready]
      results = dict(enumerate(begun)) | dict(zip(ready, self.environments.run(runs), strict=True))
      self.environments.end(keys)
    outcomes = [self._outcome(results[b], episode) for b, (_, episode) in enumerate(opened)]
    recorded = [episode for _, episode in opened]
    rollout, counts = self._rollout(spec, prompts, recorded, outcomes, version)
    sampled = sum(len(x.token_ids) for episode in recorded for x in episode.completions)
    counts |= {'generate/tokens': float(sampled)}
    counts |= {f'environment/{k}': float(v) for k, v in self.environments.take_counts().items()}
    return rollout, counts

  def _sampler(self, key: environments.EpisodeKey) -> Sampler:
    config, (index, born, part, member) = self._config, key
    noise = (config.seed, born, index, part, member)
    return Sampler(noise, config.temperature, config.environment.turns)

  def _started(self, params: Params) -> LoopbackServer:
    """The server, started with the first step."""
    if self._server is None:
      config, on_cpu = self._config, jax.devices()[0].platform == 'cpu'
      dtype, cache_dtype = precision.compute_dtype(config, on_cpu), config.rollout.cache_dtype
      settings = EngineSettings(
        slots=min(_SLOTS_ON_CPU if on_cpu else _SLOTS, config.prompts * config.rollouts),
        context=config.prompt_tokens + config.completion_tokens,
        window=_WINDOW_TOKENS,
        end_ids=tuple(self.tokenizer.end_ids),
        dtype=dtype,
        cache_dtype=dtype if cache_dtype == 'auto' else cache_dtype,
      )
      limits = Limits(_QUEUE, config.environment.deadline_s)
      self._server = LoopbackServer(self._model, params, settings, limits)
    return self._server

  def _outcome(self, result: environments.TurnResult, episode: Episode) -> int:
    """The outcome of an episode. Without a reward, one that only the harness could score is skipped."""
    if result.outcome != rewards.OK:
      self.message = self.message or result.message
      return result.outcome
    unscored = self.judge == 'environment' and episode.reward is None
    return rewards.SKIP if unscored else rewards.OK

  def _rollout(
    self,
    spec: StepSpec,
    prompts: Prompts,
    episodes: Sequence[Episode],
    outcomes: Sequence[int],
    version: int,
  ) -> tuple[Rollout, dict[str, float]]:
    """The rows of all groups, and their prompts in `self._prompts`."""
    counts: Counts = collections.defaultdict(float)
    counts |= {f'environment/{name}': 0.0 for name in _COUNTED}
    rollout = empty_records.empty_rollout(spec)._replace(memory_BxM=None, noise_BxT=None)
    turns, G = multi_turn.turns_of(rollout), self._config.rollouts
    turns.outcome_B[:] = outcomes
    rollout.version_BxT[:] = version
    tokens = []
    for p in range(len(prompts.index_P)):
      rows = range(p * G, (p + 1) * G)
      chains = self._chains({b: episodes[b] for b in rows}, turns.outcome_B, counts)
      shown = np.asarray(prompts.tokens_PxL[p][: prompts.length_P[p]])
      if chains:
        count = request_chains.shared_tokens(list(chains.values()), self._config.prompt_tokens)
        shown = next(iter(chains.values())).token_ids[:count]
      tokens.append(shown)
      for b in rows:
        if b in chains:
          self._fill(rollout, b, chains[b], len(shown), episodes[b], counts)
        else:  # a row of no tokens would not count among the failures
          rollout.tokens_BxT[b, 0] = next(iter(self.tokenizer.end_ids), 0)
          rollout.length_B[b], rollout.reason_B[b] = 1, STOPPED
    tokens_PxL, length_P = data.pad_rows(tokens, self._config.prompt_tokens)
    self._prompts = prompts._replace(tokens_PxL=tokens_PxL, length_P=length_P)
    return rollout, dict(counts)

  def _chains(
    self, episodes: dict[int, Episode], outcome_B: np.ndarray, counts: Counts
  ) -> dict[int, Chain]:
    """The chain of each row of a group; rows without one become errors in `outcome_B`."""
    chains: dict[int, Chain] = {}
    for b, episode in episodes.items():
      chain, recorded = request_chains.final_chain(episode.completions), len(episode.completions)
      counts['environment/requests'] += recorded
      counts['environment/overridden'] += episode.overridden
      leader = next(iter(chains.values()), chain)
      if chain is None or leader is None or chain.token_ids[0] != leader.token_ids[0]:
        if outcome_B[b] in (rewards.OK, rewards.SKIP):
          self.message = self.message or (_SILENT if chain is None else _APART)
          outcome_B[b] = rewards.ERROR
        continue
      chains[b] = chain
      counts['environment/dropped_requests'] += recorded - chain.requests
      counts['environment/split'] += recorded > chain.requests
    return chains

  def _fill(
    self, rollout: Rollout, b: int, chain: Chain, start: int, episode: Episode, counts: Counts
  ) -> None:
    """Write the tokens of a chain behind its prompt, of `start` tokens, into row b."""
    turns, T = multi_turn.turns_of(rollout), rollout.tokens_BxT.shape[1]
    shown = slice(start, start + T)  # what does not fit is cut
    number_S = chain.number_S[shown]
    length = len(number_S)
    rollout.tokens_BxT[b, :length] = chain.token_ids[shown]
    rollout.logp_BxT[b, :length] = chain.logp_S[shown]
    rollout.length_B[b] = length
    turns.number_BxT[b, :length] = number_S
    for turn in range(number_S.max() + 1):
      at = np.flatnonzero(number_S == turn)
      turns.state_BxT[b, at] = multi_turn.state_id(rollout.tokens_BxT[b], number_S, at[0])
    cut = length < len(chain.token_ids) - start
    ended = episode.completions[-1].finish_reason != LENGTH and not cut
    rollout.reason_B[b] = STOPPED if ended else TRUNCATED
    turns.reward_BxT[b, length - 1] = episode.reward or 0.0
    counts['environment/observation_tokens'] += float((number_S < 0).sum())
    counts['environment/cut'] += cut


def compile_call(context: RunContext) -> Callable:
  """Return a function as `programs.compile_split` does, whose rollouts are the episodes of a harness."""
  spec, episodes = context.spec, context.episodes
  assert isinstance(episodes, HarnessEpisodes)
  update = programs.compile_update(spec)

  def call(state, batch, prompts, *_):
    state, metrics = update(state, batch)
    rows = context.tables.train.rows_of(prompts)
    params = train_state.sampling_weights(spec, state)
    rollout, counts = episodes.sample(spec, params, prompts, rows, int(state.step))
    return state, rollout, metrics | counts

  return call
