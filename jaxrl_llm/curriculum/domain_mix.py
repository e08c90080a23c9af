"""How the slots are shared between domains. (names, told_2xD, slots, random) → slots of each, or None.

A domain is the source of a row. `told` holds the rollouts and the tokens of each domain that have come
back. Every public function here may be named in `config.curriculum.domain_mix.fn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.curriculum import setting_checks
from jaxrl_llm.types import UserError

_SETTLED = 50  # rollouts; fewer say nothing of a share


def none(
  names: Sequence[str], told_2xD: np.ndarray, slots: int, random: np.random.Generator
) -> None:
  """Domains do not count. Source: none."""
  del names, told_2xD, slots, random


def mix(
  names: Sequence[str],
  told_2xD: np.ndarray,
  slots: int,
  random: np.random.Generator,
  *,
  targets: Mapping[str, float],
  measure: str = 'rollouts',
) -> np.ndarray:
  """Each slot's domain is drawn ∝ t_d·clip(t_d / a_d, 0.1, 10), a_d its share of what has come back.

  The correction is 10 for a domain of which nothing has come back, and 1 for all before 50 rollouts. Domains whose
  rollouts are held back or dropped more often than others' are so made up for; `measure='tokens'` balances
  tokens instead. Raises UserError for targets of no domain of the data, and domains without.
  Source: arXiv:2604.02007 (Apriel-Reasoner), official code; tokens are ours.
  """
  setting_checks.one_of('domain.measure', measure, ('rollouts', 'tokens'))
  if sorted(targets) != sorted(names):
    raise UserError(
      f'config.curriculum.domain_mix.targets={dict(targets)!r} must name the sources of the data, each '
      f'once: {", ".join(names)}.'
    )
  for name, value in targets.items():
    setting_checks.within(f'domain.targets.{name}', value, 0, open_low=True)
  target_D = np.array([targets[name] for name in names], float)
  target_D /= target_D.sum()
  weight_D = target_D
  if told_2xD[0].sum() >= _SETTLED:
    done_D = told_2xD[int(measure == 'tokens')]
    actual_D = done_D / max(done_D.sum(), 1)
    weight_D = target_D * np.clip(target_D / np.maximum(actual_D, 1e-12), 0.1, 10)
  return random.multinomial(slots, weight_D / weight_D.sum())
