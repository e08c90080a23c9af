"""The curriculum: a Beta posterior of each prompt's success rate, and the choice of the next ones.

Plain numpy on the host, O(prompts) a step, and a function of (seed, step) and the evidence alone:
every process of a pod makes the same choice, and a resumed run continues with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.config.stages import pick
from jaxrl_llm.curriculum import (
  candidates,
  domain_mix,
  eligibility,
  evidence_decay,
  prior_pooling,
  rate_estimate,
  selection,
  setting_checks,
  slot_assignment,
  utility,
)
from jaxrl_llm.curriculum.records import (
  DatasetInfo,
  HintedPosteriors,
  Index,
  Proposal,
  StepEvidence,
)
from jaxrl_llm.types import UserError

_WINDOW = 512  # prompts whose predictions are compared with what came
_BINS = 10
_BLOCK = 1 << 15  # prompts worked on at once: what that takes stays in a core's cache

Lengths = Callable[[np.ndarray], np.ndarray]


class Curriculum:
  """propose → accept → (rollouts) → observe. See `config.curriculum` for the stages."""

  def __init__(
    self,
    config: Any,
    size: int,
    *,
    group: int,
    seed: int = 0,
    kind: np.ndarray | None = None,
    columns: Mapping[str, Any] | None = None,
  ):
    """size prompts, `group` rollouts of a prompt in a step, on average; `kind` int [size] says which are alike.

    `columns` are arrays of one entry a prompt that a stage may ask for by name: 'source' for domains,
    pass rates, features. Raises UserError for a stage function or a keyword that does not exist.
    """
    stages = dict(
      candidates=candidates,
      evidence_decay=evidence_decay,
      rate_estimate=rate_estimate,
      utility=utility,
    )
    stages |= dict(selection=selection, domain_mix=domain_mix)
    self._stage = {n: pick(m, config[n], f'curriculum.{n}') for n, m in stages.items()}
    setting_checks.within('kind_decay', config['kind_decay'], 0, 1)
    setting_checks.one_of('truncated', config['truncated'], ('count', 'ignore'))
    self._ignore = config['truncated'] == 'ignore'
    self.size, self.group, self.seed = size, group, seed
    kind_N = np.zeros(size, np.int32) if kind is None else np.asarray(kind, np.int32)
    if kind_N.shape != (size,) or kind_N.min(initial=0) < 0:
      raise ValueError(f'kind must hold {size} codes from 0 up, not {kind_N.shape} of them')
    dataset = DatasetInfo(size, group, kind_N, config['kind_decay'], columns or {})
    self._share = pick(prior_pooling, config['prior_pooling'], 'curriculum.prior_pooling')(dataset)
    self._gate = pick(eligibility, config['eligibility'], 'curriculum.eligibility')(dataset)
    self._domains, self._domain = _domains(config['domain_mix']['fn'], dataset)
    self._evidence = np.zeros((2, size), np.float32)  # right, wrong: as of step `since`
    self._since = np.zeros(size, np.int32)
    self._visits = np.zeros(size, np.int32)
    self._truncated = np.zeros(size, np.int32)
    self._steps = np.zeros((), np.int64)  # observed
    self._accepted = np.zeros(2, np.int64)  # steps, and the slots they had
    self._done = np.zeros((2, len(self._domains)), np.int64)  # rollouts and tokens that came back
    self._streams = self._stage['candidates'].func is candidates.stream
    passes = dict(passes=np.zeros(size, np.int32)) if self._streams else {}
    self._learned = dict(share=self._share.state, gate=self._gate.state, candidates=passes)
    # (predicted mean, predicted mixed, right share, was mixed) of the latest prompts.
    self._history = np.zeros((0, 4))
    self._last = np.zeros((0, 4))
    self._check()

  def _check(self) -> None:
    """Each stage checks its settings when it runs: better now than after the model is compiled."""
    self.propose(0, 1)
    one, random = np.arange(1), np.random.default_rng(0)
    self._stage['evidence_decay'](self._since[:1], 1, True)
    self._stage['selection'](self._worth(one, random, None), 1, random)
    self._stage['domain_mix'](self._domains, self._done, 1, random)

  def propose(
    self,
    step: int,
    slots: int,
    lengths: Lengths | None = None,
    hinted: HintedPosteriors | None = None,
    busy: np.ndarray | tuple = (),
  ) -> Proposal:
    """The prompts of a step; changes nothing. Raises UserError when there are fewer than slots.

    `lengths` gives the expected tokens of a rollout of each prompt, 0 where unknown. `hinted` prompts are worth what
    they are with their hints. `busy` prompts run already, or wait for rollouts: none of them is proposed. A proposal
    that is run must be accepted, before the next step's.
    """
    free_N = np.ones(self.size, bool)
    free_N[np.asarray(busy, int)] = False
    self._check_room(slots, int(free_N.sum()))
    if not slots:
      none = np.zeros(0)
      return Proposal(none.astype(np.int32), none, none, none, np.nan, ())
    random = np.random.default_rng((self.seed, 0, step))
    if self._share.reference(step):
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
    """Records that a proposal is run: the stream goes on behind it, and audits count its slots. Once a step."""
    self._accepted = self._accepted + [1, len(proposal.index)]
    if len(proposal.used):
      passes_N = self._learned['candidates']['passes'].copy()
      passes_N[proposal.used] += 1
      self._learned = self._learned | dict(candidates=dict(passes=passes_N))

  def predict(
    self, index: np.ndarray, group: int | np.ndarray | None = None
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Posterior mean, variance, and P(mixed group) of these prompts, each in a group of `group` rollouts."""
    alpha, beta = self._posterior(index).astype(float)
    total = alpha + beta
    mixed = utility.mixed_group(alpha, alpha, beta, self.group if group is None else group)
    return alpha / total, alpha * beta / (total**2 * (total + 1)), mixed

  def posterior(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """α and β of these prompts' success rates, float64."""
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
  ) -> None:
    """Learns a success mass k of n rollouts, for distinct prompts of one step.

    k is a real number in [0, n]: of binary scores how many were right, of graded ones their sum, each scaled to
    [0, 1]. `mixed` says whether the group's scores differed, which k alone cannot say; None: as binary scores, where
    0 < k < n. To be called once a step, with nothing where nothing came back: time is counted by it. `truncated` are
    rollouts that hit the length cap before they were right, of mass `truncated_k` among k (None: 0); with
    config.curriculum.truncated='ignore' they are no evidence. `tokens` are those of all n.
    """
    whole = [
      np.zeros(len(index), int) if x is None else np.asarray(x)
      for x in (index, n, truncated, tokens)
    ]
    index, n, cut, tokens = whole
    k = np.asarray(k, float)
    cut_k = np.zeros(len(index)) if truncated_k is None else np.asarray(truncated_k, float)
    mixed = (k > 0) & (k < n) if mixed is None else np.asarray(mixed, bool)
    integers = all(np.issubdtype(x.dtype, np.integer) for x in whole)
    possible = ((k >= 0) & (k <= n)).all() and ((cut_k >= 0) & (cut_k <= k)).all()
    if not integers or len(np.unique(index)) != len(index) or not possible:
      raise ValueError(
        'observe needs distinct prompts, whole numbers but of k, and 0 <= truncated_k <= k <= n'
      )
    # Floating sums depend on order; that of the rows must not matter.
    order = np.argsort(index)
    index, n, cut, tokens, k, cut_k, mixed = (x[order] for x in (*whole, k, cut_k, mixed))
    count = n
    if self._ignore:
      k = k - cut_k
      # Where rows were kept by chance, k is an estimate and may be more than the others can hold.
      count = n - np.minimum(cut, n - k)
    self._compare(index, k, n, count, mixed)
    first, judged = self._visits[index] == 0, count > 0
    self._visits[index] += 1
    self._truncated[index] += cut.astype(np.int32)
    if len(self._domains) > 1:
      np.add.at(self._done.T, self._domain[index], np.stack([n, tokens], axis=1))
    self._learn(StepEvidence(int(self._steps), *(x[judged] for x in (index, k, count, first))))
    self._steps = self._steps + 1

  def visits(self, index: np.ndarray | int) -> np.ndarray:
    """How often these prompts came back, int32."""
    return self._visits[index]

  def retired(self) -> np.ndarray:
    """int64 [..]: the prompts that the gate keeps from being chosen, whatever they are worth."""
    return np.flatnonzero(self._odds(np.arange(self.size)) >= 1)

  def metrics(self) -> dict[str, float]:
    """What the last `observe` said, and how honest the posterior was over the last 512 prompts.

    calibration_error is that of the success rate, brier that of whether a group is mixed; both
    compare with what was predicted before the evidence came. barred_share is what the gate strikes out
    of all prompts, in the mean. Single numbers that a stage has learned are told by their names.
    """
    if not len(self._history):
      return {}
    told, past = {}, self._history
    if len(self._last):
      last = self._last.mean(0)
      told = {
        'curriculum/predicted_success': float(last[0]),
        'curriculum/observed_success': float(last[2]),
        'curriculum/predicted_mixed': float(last[1]),
        'curriculum/mixed_share': float(last[3]),
      }
    told |= {
      'curriculum/coverage': float((self._visits > 0).mean()),
      'curriculum/calibration_error': _calibration_error(past[:, 0], past[:, 2]),
      'curriculum/brier': float(((past[:, 1] - past[:, 3]) ** 2).mean()),
      'curriculum/truncated_share': float(
        self._truncated.sum() / max(self._visits.sum() * self.group, 1)
      ),
    }
    if self._gate.barred:
      told['curriculum/barred_share'] = float(self._odds(np.arange(self.size)).mean())
    numbers = {k: v for state in self._learned.values() for k, v in state.items() if v.ndim == 0}
    return told | {f'curriculum/{k}': float(v) for k, v in numbers.items() if np.isfinite(v)}

  def state_dict(self) -> dict[str, np.ndarray]:
    """Everything that `observe` changed, as arrays."""
    own = {name: getattr(self, f'_{name}').copy() for name in _STATE}
    return own | {
      f'{stage}_{name}': array.copy()
      for stage, state in self._learned.items()
      for name, array in state.items()
    }

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Continues exactly. Raises UserError for the state of another data set, or of other stages."""
    now = self.state_dict()
    state = dict(accepted=now['accepted']) | state  # older checkpoints have none
    if now.keys() != state.keys():
      told = ', '.join(sorted(now.keys() ^ state.keys()))
      raise UserError(
        f'the saved curriculum was of other stages ({told}); restore config.curriculum, or start another --workdir.'
      )
    what = dict(evidence='prompts', share_pooled='kinds of prompts', done='domains')
    for name in now.keys() & what.keys():
      saved, ours = np.shape(state[name])[-1], now[name].shape[-1]
      if saved != ours:
        raise UserError(
          f'the saved curriculum is of {saved} {what[name]}, not {ours}; config.data changed: '
          'restore it, or start another --workdir.'
        )
    state = {name: np.array(array, now[name].dtype) for name, array in state.items()}
    for name in _STATE:
      setattr(self, f'_{name}', state[name])
    self._learned = {
      stage: {name: state[f'{stage}_{name}'] for name in learned}
      for stage, learned in self._learned.items()
    }

  def _check_room(self, slots: int, free: int) -> None:
    if slots > free:
      running = f', of which {self.size - free} are still running' if free < self.size else ''
      raise UserError(
        f'config.prompts={slots} is more than the {self.size} prompts of the data{running}; lower it or '
        'raise config.data.size.'
      )
    # Evidence from before the first proposal is one call of `observe`.
    if self._streams and self._steps > 1 and not self._accepted[0]:
      raise ValueError(
        'the stream of candidates would stand still: call accept(proposal) for every step before it is observed'
      )

  def _choose(self, step: int, slots: int, lengths, hinted: HintedPosteriors | None, free_N, random):
    passes_N = self._learned['candidates'].get('passes')
    pool = self._stage['candidates'](free_N, slots, self.seed, passes_N)
    worth = self._worth(pool, random, lengths)
    if hinted is not None and len(hinted.index):
      rate = self._stage['rate_estimate'](hinted.alpha, hinted.beta, random)
      # Candidates need not be in order, nor hold all that would be hinted.
      with_hint_N = np.full(self.size, np.nan)
      with_hint_N[hinted.index] = self._stage['utility'](
        rate, hinted.alpha, hinted.beta, self.group, 1.0
      )
      worth = np.where(np.isnan(with_hint_N[pool]), worth, with_hint_N[pool]).astype(worth.dtype)
    barred, out = None, np.zeros(0, int)
    if self._gate.barred:
      barred = random.random(len(pool)) < self._odds(pool)
      out = pool[barred]
    quota = self._stage['domain_mix'](self._domains, self._done, slots, random)
    own = None if quota is None else self._domain[pool]
    at = slot_assignment.seat(worth, slots, random, self._stage['selection'], barred, own, quota)
    # Steps that nobody accepted had as many slots as this one.
    before = int(self._accepted[1]) + max(step - int(self._accepted[0]), 0) * slots
    index, count = pool[at], slot_assignment.audits(before, slots, self._gate.audit)
    final = slot_assignment.audit(index, count, free_N, out, random)
    stays, used = final == index, index[:0]
    if self._streams:
      skipped = None
      if self._stage['selection'].func is selection.skip:
        skipped = np.zeros(len(pool), bool) if barred is None else barred
      used = slot_assignment.used(pool, at[stays], at[~stays], skipped)
    return final, np.where(stays, worth[at], np.nan), float(worth.mean()), used

  def _worth(
    self, pool: np.ndarray, random: np.random.Generator, lengths: Lengths | None
  ) -> np.ndarray:
    """The utility of each candidate."""
    worth = np.empty(len(pool), np.float32)
    tokens, mean = _tokens(pool, lengths)
    for at in range(0, len(pool), _BLOCK):
      part = slice(at, at + _BLOCK)
      alpha, beta = self._posterior(_contiguous(pool[part]))
      rate = self._stage['rate_estimate'](alpha, beta, random)
      length = 1.0 if mean == 0 else np.where(tokens[part] > 0, tokens[part] / mean, 1)
      worth[part] = self._stage['utility'](rate, alpha, beta, self.group, length)
    return worth

  def _posterior(self, index: Index) -> np.ndarray:
    """float32 [2, I], α and β."""
    kept = self._stage['evidence_decay'](self._since[index], int(self._steps), False)
    prior = self._share.prior(self._learned['share'], index)
    return prior + kept * self._evidence[:, index]

  def _odds(self, index: np.ndarray) -> np.ndarray:
    """Of being struck out by the gate."""
    if not self._gate.barred:
      return np.zeros(len(index))

    def mean() -> np.ndarray:
      alpha, beta = self._posterior(index)
      return alpha / (alpha + beta)

    return self._gate.barred(self._learned['gate'], index, self._visits[index], mean)

  def _compare(self, index, k, n, count, mixed: np.ndarray) -> None:
    """Keeps what was predicted of groups of n beside what came: of prompts with evidence, before it is learned."""
    some = count > 0
    mean, _, expected = self.predict(index[some], n[some])
    self._last = np.stack([mean, expected, k[some] / count[some], mixed[some]], axis=1)
    self._history = np.concatenate([self._history, self._last])[-_WINDOW:]

  def _learn(self, seen: StepEvidence) -> None:
    now, age, at = int(self._steps) + 1, self._stage['evidence_decay'], seen.index_V
    counts = np.stack([seen.right_V, seen.count_V - seen.right_V])
    fresh = age(self._since[at], now, True) * self._evidence[:, at]
    learned, gained = self._share.learn(self._learned['share'], seen)
    if gained is None:  # evidence of all others is aged when it is read
      self._evidence[:, at], self._since[at] = fresh + counts, now
    else:
      self._evidence *= age(self._since, now, False)
      self._evidence[:, at] = fresh
      self._evidence += gained
      self._since[:] = now
    self._learned |= dict(share=learned, gate=self._gate.learn(self._learned['gate'], seen))


_STATE = (
  *('evidence', 'since', 'visits', 'truncated', 'steps', 'accepted', 'done', 'history', 'last'),
)


def _domains(fn: str, dataset: DatasetInfo) -> tuple[list[str], np.ndarray]:
  """The names of the domains, and each prompt's; one without a name where they do not count."""
  if fn == 'none':
    return [''], np.zeros(0, np.int32)
  if 'source' not in dataset.columns:
    raise UserError(
      f'config.curriculum.domain_mix.fn={fn!r} needs the source of every prompt; give columns with it.'
    )
  names, codes = np.unique(np.asarray(dataset.columns['source']), return_inverse=True)
  return names.tolist(), codes.astype(np.int32)


def _tokens(pool: np.ndarray, lengths: Lengths | None) -> tuple[np.ndarray, np.float32]:
  """Expected tokens of the candidates, and the mean of those that are known; 0 where nothing is."""
  tokens = np.zeros(0, np.float32) if lengths is None else lengths(pool)
  known = np.count_nonzero(tokens)
  return tokens, np.float32(tokens.sum(dtype=float) / max(known, 1))


def _contiguous(index: np.ndarray) -> Index:
  """A slice where that is the same: it reads memory in order and copies nothing."""
  first = int(index[0])
  run = np.array_equal(index, np.arange(first, first + len(index)))
  return slice(first, first + len(index)) if run else index


def _calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
  """Σ_bins share · |mean predicted − mean observed|, ten bins of the prediction."""
  bins = np.minimum((predicted * _BINS).astype(int), _BINS - 1)
  gaps = [
    (bins == b).mean() * abs(predicted[bins == b].mean() - observed[bins == b].mean())
    for b in np.unique(bins)
  ]
  return float(sum(gaps))
