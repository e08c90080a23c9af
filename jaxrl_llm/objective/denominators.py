"""Denominators of the policy term and of the KL term, which may have its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.config.stages import choices, pick
from jaxrl_llm.objective import aggregation, kl
from jaxrl_llm.types import UserError


def of_kl(config: Any) -> Callable | None:
  """The function of `config.kl_aggregation`; None where the KL term has the denominators of the policy term.

  `auto` is what the KL function declares in its attribute `aggregate`, if anything. UserError for an unknown name.
  """
  name, valid = config.kl_aggregation['fn'], choices(aggregation)
  if name != 'auto' and name not in valid:
    raise UserError(
      f'config.objective.kl_aggregation.fn={name!r} is unknown; choose one of: auto, {", ".join(sorted(valid))}.'
    )
  if name != 'auto':
    return pick(aggregation, config.kl_aggregation, 'objective.kl_aggregation')
  own = getattr(pick(kl, config.kl, 'objective.kl').func, 'aggregate', None)
  return own and functools.partial(getattr(aggregation, own))


def weights(
  fn: Callable,
  kl_fn: Callable | None,
  mask_BxT: jax.Array,
  group_B: jax.Array,
  weight_B: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  """`weight_BxT` and `kl_weight_BxT` of `compose.Targets`; each row counts `weight_B` times in both, None: once."""

  def weight(chosen):
    out = chosen(mask_BxT, mask_BxT.shape[1], group_B)
    return out if weight_B is None else out * weight_B[:, None]

  return weight(fn), None if kl_fn is None else weight(kl_fn)
