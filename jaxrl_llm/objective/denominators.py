"""Denominators of the policy term and of the KL term, which may have its own."""

from __future__ import annotations

import functools
from typing import TypeAlias, cast

import jax

from jaxrl_llm.config.schema import ObjectiveConfig
from jaxrl_llm.config.stages import choices, pick
from jaxrl_llm.objective import aggregation, kl
from jaxrl_llm.types import Array, UserError

Aggregation: TypeAlias = functools.partial[jax.Array]


def kl_aggregation(config: ObjectiveConfig) -> Aggregation | None:
  """The function of `config.kl_aggregation`; None where the KL term has the denominator of the policy term.

  `auto` is what the KL function declares with `token_inputs.default_aggregation`. UserError for an unknown name.
  """
  name, valid = config.kl_aggregation['fn'], choices(aggregation)
  if name != 'auto' and name not in valid:
    raise UserError(
      f'config.objective.kl_aggregation.fn={name!r} is unknown; choose one of: auto, {", ".join(sorted(valid))}.'
    )
  if name != 'auto':
    return cast('Aggregation', pick(aggregation, config.kl_aggregation, 'objective.kl_aggregation'))
  penalty = cast('functools.partial[jax.Array]', pick(kl, config.kl, 'objective.kl'))
  default: str | None = getattr(penalty.func, 'default_aggregation', None)
  return None if default is None else functools.partial(getattr(aggregation, default))


def weights(
  policy_aggregation: Aggregation,
  kl_aggregation: Aggregation | None,
  mask_BxT: jax.Array,
  group_B: jax.Array,
  weight_B: Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  """`weight_BxT` and `kl_weight_BxT` of `Targets`, each row multiplied by `weight_B` (None: 1)."""

  def weight(aggregate: Aggregation) -> jax.Array:
    weight_BxT = aggregate(mask_BxT, mask_BxT.shape[1], group_B)
    return weight_BxT if weight_B is None else weight_BxT * weight_B[:, None]

  return weight(policy_aggregation), None if kl_aggregation is None else weight(kl_aggregation)
