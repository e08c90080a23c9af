"""The curriculum: a Beta posterior over each prompt's success rate, and the choice of the next prompts.

Numpy on the host, O(prompts) per step, deterministic in (seed, step) and the evidence: every process makes the same
choice, and a resumed run continues with it.
"""

from __future__ import annotations

import inspect

import numpy as np

from jaxrl_llm.config.schema import CurriculumConfig
from jaxrl_llm.config.stages import active, pick
from jaxrl_llm.curriculum import (
  candidates,
  domain_mix,
  eligibility,
  evidence_decay,
  graded_scores,
  prior_pooling,
  rate_estimate,
  selection,
  setting_checks,
  slot_assignment,
  utility,
)
from jaxrl_llm.curriculum.evidence import (
  Evidence,
  Lengths,
  calibration_metrics,
  checked_evidence,
  contiguous,
  expected_tokens,
  visit_metrics,
  without_truncated,
)
from jaxrl_llm.curriculum.records import (
  DatasetInfo,
  EligibilityRule,
  HintedPosteriors,
  Index,
  PriorPool,
  Proposal,
  StepEvidence,
  checked_kinds,
  checked_state,
  domain_codes,
)
from jaxrl_llm.types import Settings

_WINDOW = 512  # latest prompts whose predictions are compared with observations
_BLOCK = 1 << 15  # prompts per block, so that its arrays fit the cache of a core

_STAGES = dict(
  candidates=candidates,
  evidence_decay=evidence_decay,
  rate_estimate=rate_estimate,
  utility=utility,
  selection=selection,
  domain_mix=domain_mix,
)
_ALWAYS_ON = ('rate_estimate', 'utility', 'selection')


class Curriculum:
  """Call order in a step: propose, accept, (rollouts), observe. See `config.curriculum` for the stages."""

  def __init__(
    self,
    config: CurriculumConfig,
    size: int,
    *,
    group: int,
    seed: int = 0,
    kind: np.ndarray | None = None,
    columns: Settings | None = None,
  ):
    """`size` prompts with `group` rollouts per step on average; `kind`, int [size], is the kind of each prompt.

    `columns` are fields of the rows, one entry per prompt, that stages read by name: 'source' for domains, pass rates,
    features. Raises UserError for an unknown function or setting of a stage.
    """
    picked = {n: pick(m, config[n], f'curriculum.{n}') for n, m in _STAGES.items()}
    self._stages = {n: fn for n, fn in picked.items() if n in _ALWAYS_ON or active(fn)}
    setting_checks.check_range('kind_decay', config['kind_decay'], 0, 1)
    setting_checks.check_choice('truncated', config['truncated'], ('count', 'ignore'))
    self._ignore = config['truncated'] == 'ignore'
    self.size, self.group, self.seed = size, group, seed
    self._kind_N, self._kind_decay = checked_kinds(kind, size), config['kind_decay']
    dataset = DatasetInfo(size, group, self._kind_N, self._kind_decay, columns or {}, seed)
    self._takes_exponent = 'exponent' in inspect.signature(self._stages['utility'].func).parameters
    pool = active(pick(prior_pooling, config['prior_pooling'], 'curriculum.prior_pooling'))
    rule = active(pick(eligibility, config['eligibility'], 'curriculum.eligibility'))
    self._prior_pool: PriorPool | None = pool and pool(dataset)
    # The runner stores hidden states of prompts here; None: the prior reads none.
    self.features = self._prior_pool and self._prior_pool.features
    self._eligibility: EligibilityRule | None = rule and rule(dataset)
    self._bars = self._eligibility and self._eligibility.barred  # None: all prompts are eligible
    self._domains, self._domain = domain_codes(config['domain_mix']['fn'], dataset)
    self._evidence = np.zeros((2, size), np.float32)  # right and wrong counts as of step `since`
    self._since = np.zeros(size, np.int32)
    self._visits, self._truncated = (np.zeros(size, np.int32) for _ in range(2))
    self._steps = np.zeros((), np.int64)  # number of steps observed
    self._accepted = np.zeros(2, np.int64)  # number of accepted steps, and of their slots
    self._done = np.zeros((2, len(self._domains)), np.int64)  # rollouts and tokens of each domain
    source = self._stages.get('candidates')
    self._streaming = source is not None and source.func is candidates.stream
    self._newest = None  # else the features whose newest prompts are the candidates
    if source is not None and source.func is candidates.encoded:
      setting_checks.check_encodes(config['prior_pooling']['fn'], self.features is not None)
      self._newest = self.features
    passes = dict(passes=np.zeros(size, np.int32)) if self._streaming else {}
    # The names are those of saved states.
    stateful = dict(share=self._prior_pool, gate=self._eligibility, features=self.features)
    self._learned = {name: stage.state if stage else {} for name, stage in stateful.items()}
    self._learned |= dict(candidates=passes, graded=graded_scores.initial(dataset.kinds))
    # Columns: predicted success, predicted mixed, observed success, mixed; of the latest prompts.
    self._history = self._latest = np.zeros((0, 4))
    self._check()

  def _check(self) -> None:
    """Runs each stage once, as it checks its settings when it runs, so that errors come before compilation."""
    self.propose(0, 1)
    first, random = np.arange(1), np.random.default_rng(0)
    self._decay(self._since[:1], 1, True)
    self._stages['selection'](self._utility(first, random, None), 1, random)
    if 'domain_mix' in self._stages:
      self._stages['domain_mix'](self._domains, self._done, 1, random)

  def propose(
    self,
    step: int,
    slots: int,
    lengths: Lengths | None = None,
    hinted: HintedPosteriors | None = None,
    busy: np.ndarray | tuple[int, ...] = (),
  ) -> Proposal:
    """The prompts of a step, without a change of state. Raises UserError for fewer prompts than slots.

    `lengths` returns the expected tokens of a rollout of each prompt, 0 where unknown. `hinted` prompts have the
    utility of their hinted posterior. `busy` prompts have unfinished rollouts and are not proposed. A proposal that is
    run must be accepted before the next step.
    """
    free_N = np.ones(self.size, bool)
    free_N[np.asarray(busy, int)] = False
    if slots > free_N.sum():
      raise slot_assignment.no_room(slots, free_N)
    # One call of `observe` without a proposal is allowed: evidence from before the first step.
    if self._streaming and self._steps > 1 and not self._accepted[0]:
      raise ValueError(
        'the stream of candidates does not advance: call accept(proposal) for every step before observe'
      )
    if not slots:
      return Proposal(np.zeros(0, np.int32), *[np.zeros(0)] * 3, np.nan, ())
    random = np.random.default_rng((self.seed, 0, step))
    if self._prior_pool and self._prior_pool.reference and self._prior_pool.reference(step):
      index = random.choice(np.flatnonzero(free_N), slots, replace=False)
      worth, why = np.full(slots, np.nan), ('reference',) * slots
      mean_worth, used = np.nan, index[:0]
    else:
      index, worth, mean_worth, used = self._choose(step, slots, lengths, hinted, free_N, random)
      why = tuple('audit' if np.isnan(x) else 'picked' for x in worth)
    index = index.astype(np.int32)
    mean, _, mixed = self.predict(index)
    return Proposal(index, mean, mixed, worth, mean_worth, why, used)

  def accept(self, proposal: Proposal) -> None:
    """Records that a proposal is run: the stream moves past it, and audits count its slots. Call once per step."""
    self._accepted = self._accepted + [1, len(proposal.index)]
    if len(proposal.used):
      passes_N = self._learned['candidates']['passes'].copy()
      passes_N[proposal.used] += 1
      self._learned = self._learned | dict(candidates=dict(passes=passes_N))

  def to_encode(self, step: int, block: int) -> np.ndarray:
    """The prompts that a step of `block` prompts encodes for `features`, besides its own: a multiple of `block`.

    Of those in turn, `selection` takes them by what is known before they are encoded. No change of state.
    """
    assert self.features is not None
    index, count = self.features.others(step, block), self.features.multiple * block
    if not self.features.ready or len(index) <= count:
      return index
    random = np.random.default_rng((self.seed, 3, step))
    return index[self._stages['selection'](self._utility(index, random, None), count, random)]

  def predict(
    self, index: np.ndarray, group: int | np.ndarray | None = None
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Posterior mean, variance, and P(mixed group) of these prompts, for groups of `group` rollouts."""
    alpha, beta = self.posterior(index)
    total, n = alpha + beta, self.group if group is None else group
    mixed = utility.mixed_group(alpha, alpha, beta, n, exponent=self._exponent(index))
    return alpha / total, alpha * beta / (total**2 * (total + 1)), mixed

  def posterior(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """α and β of the posteriors of these prompts, float64."""
    alpha, beta = self._posterior(index).astype(float)
    return alpha, beta

  def observe(
    self,
    index: np.ndarray,
    k: np.ndarray,
    n: np.ndarray,
    truncated: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    mixed: np.ndarray | None = None,
    truncated_k: np.ndarray | None = None,
    *,
    graded: np.ndarray | None = None,
    truncated_graded: np.ndarray | None = None,
  ) -> None:
    """Updates the posteriors with a success mass k of n rollouts, for distinct prompts of one step.

    k is a real number in [0, n]: the number of right rollouts, or the sum of scores scaled to [0, 1]. `graded` is the
    sum of x(1 − x) over these scores x (None: 0, as for binary scores). `mixed` is True where the scores of the group
    differ; None: where 0 < k < n. `truncated` rollouts hit the length cap and were not right, with the parts
    `truncated_k` and `truncated_graded` (None: 0); with config.curriculum.truncated='ignore' they do not count.
    `tokens` are those of all n. Call once per step, with empty arrays where no rollouts finished: calls count time.
    """
    real = truncated_k, graded, truncated_graded
    evidence = checked_evidence(index, k, n, truncated, tokens, mixed, *real)
    generated_V, at = evidence.count_V, evidence.index_V
    evidence = without_truncated(evidence) if self._ignore else evidence
    counted_V, first_V = evidence.count_V > 0, self._visits[at] == 0
    self._compare(Evidence(*(x[counted_V] for x in evidence)), generated_V[counted_V])
    self._visits[at] += 1
    self._truncated[at] += evidence.truncated_V.astype(np.int32)
    if len(self._domains) > 1:
      np.add.at(self._done.T, self._domain[at], np.stack([generated_V, evidence.tokens_V], axis=1))
    used = at, evidence.mass_V, evidence.count_V, first_V, evidence.graded_V
    self._learn(StepEvidence(int(self._steps), *(x[counted_V] for x in used)))
    self._steps = self._steps + 1

  def visits(self, index: np.ndarray | int) -> np.ndarray:
    """The number of observed visits to these prompts, int32."""
    return self._visits[index]

  def retired(self) -> np.ndarray:
    """Indices of the prompts that `eligibility` bars with probability 1, int64."""
    return np.flatnonzero(self._barred(np.arange(self.size)) >= 1)

  def metrics(self) -> dict[str, float]:
    """Statistics of the last `observe`, and calibration of the posterior over the last 512 prompts.

    calibration_error is for the success rate, brier for mixed groups; both use predictions from before the evidence.
    barred_share is the mean probability that `eligibility` bars a prompt. Scalars in the state of a stage are logged by
    their names.
    """
    if not len(self._history):
      return {}
    metrics = calibration_metrics(self._latest, self._history)
    metrics |= visit_metrics(self._visits, self._truncated, self.group)
    if self._bars is not None:
      metrics['curriculum/barred_share'] = float(self._barred(np.arange(self.size)).mean())
    numbers = {k: v for state in self._learned.values() for k, v in state.items() if v.ndim == 0}
    return metrics | {f'curriculum/{k}': float(v) for k, v in numbers.items() if np.isfinite(v)}

  def state_dict(self) -> dict[str, np.ndarray]:
    """All state that `accept` and `observe` change, as arrays."""
    arrays = {name: getattr(self, f'_{_STATE[name]}').copy() for name in _STATE}
    return arrays | {
      f'{stage}_{name}': array.copy()
      for stage, state in self._learned.items()
      for name, array in state.items()
    }

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Restore from `state_dict`. Raises UserError for the state of another data set or of other stages."""
    state = checked_state(state, self.state_dict())
    for name in _STATE:
      setattr(self, f'_{_STATE[name]}', state[name])
    self._learned = {
      stage: {name: state[f'{stage}_{name}'] for name in learned}
      for stage, learned in self._learned.items()
    }
    if self.features:
      self.features.load(self._learned['features'])

  def _choose(
    self,
    step: int,
    slots: int,
    lengths: Lengths | None,
    hinted: HintedPosteriors | None,
    free_N: np.ndarray,
    random: np.random.Generator,
  ) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    """(prompts, utility or nan, mean utility of the candidates, consumed candidates)."""
    pool, passes_N = np.flatnonzero(free_N), self._learned['candidates'].get('passes')
    if 'candidates' in self._stages:
      among_N = self._newest.newest(free_N, slots) if self._newest else free_N
      pool = self._stages['candidates'](among_N, slots, self.seed, passes_N, random)
    worth = self._utility(pool, random, lengths)
    if hinted is not None and len(hinted.index):
      rate = self._stages['rate_estimate'](hinted.alpha, hinted.beta, random)
      # Candidates may be in any order, and may lack some hinted prompts.
      with_hint_N = np.full(self.size, np.nan)
      with_hint_N[hinted.index] = self._worth(hinted.index, rate, hinted.alpha, hinted.beta, 1.0)
      worth = np.where(np.isnan(with_hint_N[pool]), worth, with_hint_N[pool]).astype(worth.dtype)
    rule, select = self._eligibility, self._stages['selection']
    barred = quota = domain = None
    if self._bars is not None:
      barred = random.random(len(pool)) < self._barred(pool)
    if 'domain_mix' in self._stages:
      quota = self._stages['domain_mix'](self._domains, self._done, slots, random)
      domain = self._domain[pool]
    if barred is None and quota is None:
      at = select(worth, slots, random)
    else:
      at = slot_assignment.assign_slots(worth, slots, random, select, barred, domain, quota)
    index = final = pool[at]
    if rule is not None and rule.audit:
      # Steps without a call of `accept` count with the slots of this one.
      before = int(self._accepted[1]) + max(step - int(self._accepted[0]), 0) * slots
      count = slot_assignment.audit_count(before, slots, rule.audit)
      barred_index = index[:0] if barred is None else pool[barred]
      final = slot_assignment.replace_with_audits(index, count, free_N, barred_index, random)
    unchanged, used, skipped = final == index, index[:0], None
    if self._streaming:
      if select.func is selection.skip:
        skipped = np.zeros(len(pool), bool) if barred is None else barred
      used = slot_assignment.consumed_candidates(pool, at[unchanged], at[~unchanged], skipped)
    return final, np.where(unchanged, worth[at], np.nan), float(worth.mean()), used

  def _utility(
    self, pool: np.ndarray, random: np.random.Generator, lengths: Lengths | None
  ) -> np.ndarray:
    """The utility of each candidate."""
    worth = np.empty(len(pool), np.float32)
    tokens, mean = expected_tokens(pool, lengths)
    for at in range(0, len(pool), _BLOCK):
      part = slice(at, at + _BLOCK)
      index = contiguous(pool[part])
      alpha, beta = self._posterior(index)
      rate = self._stages['rate_estimate'](alpha, beta, random)
      length = 1.0 if mean == 0 else np.where(tokens[part] > 0, tokens[part] / mean, 1)
      worth[part] = self._worth(index, rate, alpha, beta, length)
    return worth

  def _worth(
    self,
    index: Index,
    rate: np.ndarray,
    alpha: np.ndarray,
    beta: np.ndarray,
    length: utility.Length,
  ) -> np.ndarray:
    exponent = self._exponent(index) if self._takes_exponent else None
    extra = {} if exponent is None else dict(exponent=exponent)
    return self._stages['utility'](rate, alpha, beta, self.group, length, **extra)

  def _exponent(self, index: Index) -> np.ndarray | None:
    """The exponent of P(mixed) for these prompts; None where all scores were binary, which then pay nothing."""
    graded = self._learned['graded']
    return graded_scores.exponents(graded)[self._kind_N[index]] if graded['found'].any() else None

  def _posterior(self, index: Index) -> np.ndarray:
    """float32 [2, I], α and β."""
    evidence = self._decay(self._since[index], int(self._steps), False) * self._evidence[:, index]
    if self._prior_pool is None:
      return np.float32(1) + evidence
    return self._prior_pool.prior(self._learned['share'], index) + evidence

  def _decay(self, since: np.ndarray, now: int, visited: bool) -> evidence_decay.Factor:
    """The factor of `evidence_decay` on evidence of the steps `since`; 1 where the stage is off."""
    stage = self._stages.get('evidence_decay')
    return 1.0 if stage is None else stage(since, now, visited)

  def _barred(self, index: np.ndarray) -> np.ndarray:
    """The probability [I] that `eligibility` bars each prompt."""
    if self._bars is None:
      return np.zeros(len(index))

    def mean() -> np.ndarray:
      alpha, beta = self._posterior(index)
      return alpha / (alpha + beta)

    return self._bars(self._learned['gate'], index, self._visits[index], mean)

  def _compare(self, evidence: Evidence, n_V: np.ndarray) -> None:
    """Compares predictions for groups of n with the observations, before the update; every prompt has evidence."""
    at, rate_V = evidence.index_V, evidence.mass_V / evidence.count_V
    mean_V, _, mixed_V = self.predict(at, n_V)
    self._latest = np.stack([mean_V, mixed_V, rate_V, evidence.mixed_V], axis=1)
    self._history = np.concatenate([self._history, self._latest])[-_WINDOW:]
    if not (evidence.graded_V.any() or self._learned['graded']['found'].any()):
      return
    alpha_V, beta_V = self.posterior(at)
    binary_V = utility.mixed_group(alpha_V, alpha_V, beta_V, n_V)
    seen = self._kind_N[at], evidence.graded_V, binary_V, evidence.mixed_V
    self._learned['graded'] = graded_scores.learn(self._learned['graded'], *seen, self._kind_decay)

  def _learn(self, evidence: StepEvidence) -> None:
    now, at, gained = int(self._steps) + 1, evidence.index_V, None
    counts = np.stack([evidence.right_V, evidence.count_V - evidence.right_V])
    fresh = self._decay(self._since[at], now, True) * self._evidence[:, at]
    if self._prior_pool is not None:
      learned, gained = self._prior_pool.learn(self._learned['share'], evidence)
      self._learned |= dict(share=learned)
    if gained is None:  # evidence of all others decays when it is read
      self._evidence[:, at], self._since[at] = fresh + counts, now
    else:
      self._evidence *= self._decay(self._since, now, False)
      self._evidence[:, at] = fresh
      self._evidence += gained
      self._since[:] = now
    if self._eligibility is not None and self._eligibility.learn is not None:
      self._learned |= dict(gate=self._eligibility.learn(self._learned['gate'], evidence))


# Names in saved states → attributes.
_STATE = {n: n for n in ('evidence', 'since', 'visits', 'truncated', 'steps', 'accepted', 'done')}
_STATE |= dict(history='history', last='latest')
