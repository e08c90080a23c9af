"""Shares of the slots by domain: (names, done_2xD, slots, random) → slots of each.

A domain is the source of a row. `done_2xD` holds the rollouts and the tokens of each domain that have been observed.
Every public function may be named in `config.curriculum.domain_mix.fn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.curriculum import setting_checks
from jaxrl_llm.types import UserError

_MIN_ROLLOUTS = 50  # fewer are too few to estimate shares


def none() -> None:
  """Slots are not assigned by domain."""


def mix(
  names: Sequence[str],
  done_2xD: np.ndarray,
  slots: int,
  random: np.random.Generator,
  *,
  targets: Mapping[str, float],
  measure: str = 'rollouts',
) -> np.ndarray:
  """Each slot's domain is drawn ∝ t_d·clip(t_d / a_d, 0.1, 10), a_d its share of the observed rollouts.

  The factor is 10 for a domain without observed rollouts, and 1 for all before 50 rollouts. It compensates for domains
  whose rollouts are delayed or dropped more often. `measure='tokens'` balances tokens instead. Raises UserError for
  targets that are not the domains of the data. arXiv:2604.02007 (Apriel-Reasoner), official code; tokens are ours.
  """
  setting_checks.check_choice('domain_mix.measure', measure, ('rollouts', 'tokens'))
  if sorted(targets) != sorted(names):
    raise UserError(
      f'config.curriculum.domain_mix.targets={dict(targets)!r} must name the sources of the data, each '
      f'once: {", ".join(names)}.'
    )
  for name, value in targets.items():
    setting_checks.check_range(f'domain_mix.targets.{name}', value, 0, open_low=True)
  target_D = np.array([targets[name] for name in names], float)
  target_D /= target_D.sum()
  weight_D = target_D
  if done_2xD[0].sum() >= _MIN_ROLLOUTS:
    done_D = done_2xD[int(measure == 'tokens')]
    actual_D = done_D / max(done_D.sum(), 1)
    weight_D = target_D * np.clip(target_D / np.maximum(actual_D, 1e-12), 0.1, 10)
  return random.multinomial(slots, weight_D / weight_D.sum())
