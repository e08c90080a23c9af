"""Which candidates are taken. (utility, slots, random) → positions, the most useful first.

Every public function here may be named in `config.curriculum.selection.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import setting_checks


def top(utility: np.ndarray, slots: int, random: np.random.Generator) -> np.ndarray:
  """The `slots` largest; equal ones in random order. Source: arXiv:2507.04632 (MoPPS)."""
  chosen = _smallest(-utility, slots)
  if len(chosen) > slots:  # only the ties of the last one taken are drawn
    last = utility[chosen].min()
    above, ties = chosen[utility[chosen] > last], chosen[utility[chosen] == last]
    drawn = random.choice(ties, slots - len(above), replace=False, shuffle=False)
    chosen = np.concatenate([above, drawn])
  order = random.permutation(chosen)
  return order[np.argsort(-utility[order], kind='stable')]


def softmax(
  utility: np.ndarray, slots: int, random: np.random.Generator, *, temperature: float = 0.2
) -> np.ndarray:
  """Without replacement, proportional to exp(utility / temperature), by exponential clocks.

  Who rings first: E_i / exp(u_i / τ), which is Gumbel top-k by other noise. Temperature is in
  units of the utility: 0.2 is twenty points of P(mixed). Raises UserError where it
  is not above 0. Source: arXiv:2506.05316 (DOTS; temperature 1e-3 on −|p̂ − ½|).
  """
  setting_checks.within('pick.temperature', temperature, 0, open_low=True)
  with np.errstate(divide='ignore'):  # a clock that rings at once is first, and that is all
    time = np.log(random.standard_exponential(len(utility), dtype=np.float32))
  time -= utility / np.float32(temperature)
  chosen = _smallest(time, slots)
  return chosen[np.argsort(time[chosen], kind='stable')[:slots]]


def skip(utility: np.ndarray, slots: int, random: np.random.Generator) -> np.ndarray:
  """As the candidates come, whatever they are worth; those to be skipped the gate has struck out.

  Source: arXiv:2506.02177 (GRESO).
  """
  del random
  return np.arange(min(slots, len(utility)))


_STRIDE = 64  # one in so many is looked at first


def _smallest(key: np.ndarray, count: int) -> np.ndarray:
  """Positions, ascending, of the `count` smallest and of all that equal the last of them: O(N), no sort."""
  if count >= len(key):
    return np.arange(len(key))
  # Four times the share of a sample holds them nearly surely; where it does not, all are looked at.
  sample, rank = key[::_STRIDE], 4 * count // _STRIDE + 32
  near = np.arange(0)
  if rank < len(sample):
    near = np.flatnonzero(key <= np.partition(sample, rank)[rank])
  if len(near) < count:
    near = np.arange(len(key))
  close = key[near]
  return near[close <= np.partition(close, count - 1)[count - 1]]
