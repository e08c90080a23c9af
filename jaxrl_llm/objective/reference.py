"""The reference model of KL terms: a copy of the first weights, which may follow the policy.

A public function, named in `config.objective.reference.fn`, returns None or settings.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxrl_llm.types import Params, UserError


class Refresh(NamedTuple):
  """Settings of `refreshed` and `reincarnated`, and their formula."""

  every: int
  mixup: float
  once: bool = False

  def after_step(self, step: jax.Array, reference: Params, params: Params) -> Params:
    """The reference weights after optimizer step number `step`, counted from 1."""
    keep = 1 - self.mixup

    def mix() -> Params:
      return jax.tree.map(lambda x, y: keep * x + self.mixup * y, reference, params)

    due = step == self.every if self.once else step % self.every == 0
    return jax.lax.cond(due, mix, lambda: reference)


def frozen() -> None:
  """The weights at the start of the run."""
  return None


def refreshed(*, every: int = 512, mixup: float = 0.6) -> Refresh:
  """ref ← (1 − mixup)·ref + mixup·θ after every `every`-th optimizer step; mixup = 1 copies the policy.

  The defaults are TRL's `ref_model_sync_steps` and `ref_model_mixup_alpha`. Raises UserError for settings out of
  range. arXiv:2404.09656 (Learn Your Reference Model).
  """
  where = 'config.objective.reference'
  if every < 1:
    raise UserError(f'{where}.every={every} must be at least 1 optimizer step.')
  if not 0 < mixup <= 1:
    raise UserError(f'{where}.mixup={mixup} must be above 0 and at most 1; fn=frozen keeps it.')
  return Refresh(every, mixup)


def reincarnated(*, after: int = 50) -> Refresh:
  """ref ← θ after optimizer step number `after`, and never again. Raises UserError for a number below 1.

  The abstract states that the base model is replaced once, in mid-training; third-party notes say after 50 or 100
  steps. arXiv:2507.06892 (ReMix).
  """
  if after < 1:
    raise UserError(
      f'config.objective.reference.after={after} must be an optimizer step from 1 up.'
    )
  return Refresh(after, 1.0, once=True)
