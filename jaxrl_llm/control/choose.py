"""Which candidates are taken. (utility, slots, random) → positions, the most useful first.

Every public function here may be named in `config.curriculum.pick.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.control import setting


def top(utility: np.ndarray, slots: int, random: np.random.Generator) -> np.ndarray:
  """The `slots` largest; equal ones in random order. Source: arXiv:2507.04632 (MoPPS)."""
  order = random.permutation(len(utility))
  return order[np.argsort(-utility[order], kind='stable')[:slots]]


def softmax(
  utility: np.ndarray, slots: int, random: np.random.Generator, *, temperature: float = 0.2
) -> np.ndarray:
  """Without replacement, proportional to exp(utility / temperature), by Gumbel top-k.

  Temperature is in units of the utility: 0.2 is twenty points of P(mixed). Raises UserError where it
  is not above 0. Source: arXiv:2506.05316 (DOTS; temperature 1e-3 on −|p̂ − ½|).
  """
  setting.within('pick.temperature', temperature, 0, open_low=True)
  noise = random.gumbel(size=len(utility))
  return np.argsort(-(utility / temperature + noise), kind='stable')[:slots]
