"""The curriculum: a Beta posterior of each prompt's success rate, and the choice of the next ones.

Plain numpy on the host, O(prompts) a step, and a function of (seed, step) and the evidence alone:
every process of a pod makes the same choice, and a resumed run continues with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import pick
from jaxrl_llm.control import candidates, choose, forget, gate, setting, share, utility, value
from jaxrl_llm.types import UserError

_WINDOW = 512  # prompts whose predictions are compared with what came
_BINS = 10


class Proposal(NamedTuple):
  """The prompts of a step, with what the posterior expected of them."""

  index: np.ndarray  # int32 [slots], distinct
  p_mean: np.ndarray  # float64 [slots], expected success rate
  p_mixed: np.ndarray  # float64 [slots], probability that the group is mixed


class Curriculum:
  """propose → (rollouts) → observe. See `config.curriculum` for the seven stages."""

  def __init__(
    self, config: Any, size: int, *, group: int, seed: int = 0, kind: np.ndarray | None = None
  ):
    """size prompts, groups of `group` rollouts; `kind` int [size] says which prompts are alike.

    Raises UserError for a stage function or a keyword that does not exist.
    """
    stages = dict(
      candidates=candidates, forget=forget, share=share, value=value, utility=utility, gate=gate
    )
    self._stage = {n: pick(m, config[n], f'curriculum.{n}') for n, m in stages.items()}
    self._stage['pick'] = pick(choose, config['pick'], 'curriculum.pick')
    self._kind_decay = config['kind_decay']
    setting.within('kind_decay', self._kind_decay, 0, 1)
    self.size, self.group, self.seed = size, group, seed
    self._kind = np.zeros(size, np.int32) if kind is None else np.asarray(kind, np.int32)
    if self._kind.shape != (size,) or self._kind.min(initial=0) < 0:
      raise ValueError(f'kind must hold {size} codes from 0 up, not {self._kind.shape} of them')
    self._evidence = np.zeros((size, 2))
    self._pooled = np.zeros((int(self._kind.max(initial=0)) + 1, 2))
    self._visits = np.zeros(size, np.int32)
    self._truncated = np.zeros(size, np.int32)
    # (predicted mean, predicted mixed, right share, was mixed) of the latest prompts.
    self._history = np.zeros((0, 4))
    self._last = np.zeros((0, 4))
    # Each stage checks its settings when it runs: better now than after the model is compiled.
    self.propose(0, 1)
    self._stage['forget'](self._evidence, np.arange(1))

  def propose(self, step: int, slots: int) -> Proposal:
    """The prompts of a step; changes nothing. Raises UserError when there are fewer than slots."""
    if slots > self.size:
      raise UserError(
        f'config.prompts={slots} is more than the {self.size} prompts of the data; lower it or '
        'raise config.data.size.'
      )
    random = np.random.default_rng((self.seed, 0, step))
    pool = self._stage['candidates'](self.size, slots, self.seed, step)
    alpha, beta = self._posterior(pool)
    rate = self._stage['value'](alpha, beta, random)
    worth = self._stage['utility'](rate, alpha, beta, self.group)
    index = pool[self._stage['pick'](worth, slots, random)]
    index = self._stage['gate'](index, self.size, step, random).astype(np.int32)
    mean, _, mixed = self.predict(index)
    return Proposal(index, mean, mixed)

  def predict(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Posterior mean, variance, and P(mixed group) of these prompts."""
    alpha, beta = self._posterior(index)
    total = alpha + beta
    mixed = utility.mixed_group(alpha, alpha, beta, self.group)
    return alpha / total, alpha * beta / (total**2 * (total + 1)), mixed

  def observe(
    self, index: np.ndarray, k: np.ndarray, n: np.ndarray, truncated: np.ndarray | None = None
  ) -> None:
    """Learns that k of n rollouts were right, integers, for distinct prompts of one step.

    `truncated` counts rollouts that hit the length cap; it is kept apart and is no evidence.
    """
    index, k, n = (np.asarray(x) for x in (index, k, n))
    whole = all(np.issubdtype(x.dtype, np.integer) for x in (index, k, n))
    if not whole or len(np.unique(index)) != len(index) or (k > n).any() or (k < 0).any():
      raise ValueError('observe needs integers, distinct prompts, and 0 <= k <= n')
    # Floating sums depend on order; that of the rows must not matter.
    order = np.argsort(index)
    index, k, n = index[order], k[order], n[order]
    mean, _, mixed = self.predict(index)
    rate = k / np.maximum(n, 1)
    self._last = np.stack([mean, mixed, rate, (k > 0) & (k < n)], axis=1)
    self._history = np.concatenate([self._history, self._last])[-_WINDOW:]
    counts = np.stack([k, n - k], axis=1)
    self._evidence = self._stage['forget'](self._evidence, index)
    self._evidence[index] += counts
    # A kind ages by how often it was seen, whatever the order of rows.
    seen_K = np.bincount(self._kind[index], minlength=len(self._pooled))
    self._pooled *= self._kind_decay ** seen_K[:, None]
    np.add.at(self._pooled, self._kind[index], counts)
    self._visits[index] += 1
    if truncated is not None:
      self._truncated[index] += np.asarray(truncated, np.int32)[order]

  def metrics(self) -> dict[str, float]:
    """What the last `observe` said, and how honest the posterior was over the last 512 prompts.

    calibration_error is that of the success rate, brier that of whether a group is mixed; both
    compare with what was predicted before the evidence came.
    """
    if not len(self._last):
      return {}
    last, past = self._last.mean(0), self._history
    return {
      'curriculum/predicted_success': float(last[0]),
      'curriculum/observed_success': float(last[2]),
      'curriculum/predicted_mixed': float(last[1]),
      'curriculum/mixed_share': float(last[3]),
      'curriculum/coverage': float((self._visits > 0).mean()),
      'curriculum/calibration_error': _calibration_error(past[:, 0], past[:, 2]),
      'curriculum/brier': float(((past[:, 1] - past[:, 3]) ** 2).mean()),
      'curriculum/truncated_share': float(
        self._truncated.sum() / max(self._visits.sum() * self.group, 1)
      ),
    }

  def state_dict(self) -> dict[str, np.ndarray]:
    """Everything that `observe` changed, as arrays."""
    return {name: getattr(self, f'_{name}').copy() for name in _STATE}

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Continues exactly. Raises UserError for the state of another data set."""
    for name, what in (('evidence', 'prompts'), ('pooled', 'kinds of prompts')):
      saved, now = np.shape(state[name]), getattr(self, f'_{name}').shape
      if saved != now:
        raise UserError(
          f'the saved curriculum is of {saved[0]} {what}, not {now[0]}; config.data changed: '
          'restore it, or start another --workdir.'
        )
    for name in _STATE:
      setattr(self, f'_{name}', np.array(state[name]))

  def _posterior(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    prior = self._stage['share'](self._pooled, self._kind[index])
    alpha, beta = (prior + self._evidence[index]).T
    return alpha, beta


_STATE = ('evidence', 'pooled', 'visits', 'truncated', 'history', 'last')


def _calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
  """Σ_bins share · |mean predicted − mean observed|, ten bins of the prediction."""
  bins = np.minimum((predicted * _BINS).astype(int), _BINS - 1)
  gaps = [
    (bins == b).mean() * abs(predicted[bins == b].mean() - observed[bins == b].mean())
    for b in np.unique(bins)
  ]
  return float(sum(gaps))
