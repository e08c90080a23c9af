"""Selection of candidates by utility: (utility, slots, random) → positions, highest utility first.

Every public function may be named in `config.curriculum.selection.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import setting_checks


def top(utility: np.ndarray, slots: int, random: np.random.Generator) -> np.ndarray:
  """The `slots` largest; equal ones in random order. arXiv:2507.04632 (MoPPS)."""
  chosen = _smallest(-utility, slots)
  if len(chosen) > slots:  # ties at the border are broken at random
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

  The smallest E_i / exp(u_i / τ) are chosen, E_i exponential noise: equivalent to Gumbel top-k. Temperature is in units
  of the utility: 0.2 is 20 percentage points of P(mixed). Raises UserError where it is not above 0.
  arXiv:2506.05316 (DOTS; temperature 1e-3 on −|p̂ − ½|).
  """
  setting_checks.check_range('selection.temperature', temperature, 0, open_low=True)
  with np.errstate(divide='ignore'):  # log 0 is −inf, which sorts first
    time = np.log(random.standard_exponential(len(utility), dtype=np.float32))
  time -= utility / np.float32(temperature)
  chosen = _smallest(time, slots)
  return chosen[np.argsort(time[chosen], kind='stable')[:slots]]


def skip(utility: np.ndarray, slots: int, random: np.random.Generator) -> np.ndarray:
  """The first candidates, whatever their utility; `eligibility` has removed those to skip.

  arXiv:2506.02177 (GRESO).
  """
  del random
  return np.arange(min(slots, len(utility)))


_STRIDE = 64  # the sample takes every 64th key


def _smallest(key: np.ndarray, count: int) -> np.ndarray:
  """Positions, ascending, of the `count` smallest keys and of all ties with the largest of them: O(N), no sort."""
  if count >= len(key):
    return np.arange(len(key))
  # Four times the share of a sample almost surely contains them; otherwise all keys are used.
  sample, rank = key[::_STRIDE], 4 * count // _STRIDE + 32
  near = np.arange(0)
  if rank < len(sample):
    near = np.flatnonzero(key <= np.partition(sample, rank)[rank])
  if len(near) < count:
    near = np.arange(len(key))
  close = key[near]
  return near[close <= np.partition(close, count - 1)[count - 1]]
