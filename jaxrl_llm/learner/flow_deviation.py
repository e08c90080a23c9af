"""How far the policy's hidden states are from a flow between them: the output of the auxiliary model `flow`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.learner.microbatch import Microbatch, packed_hidden_states, policy_weights
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import flow_head
from jaxrl_llm.objective.auxiliary_loss import Flow
from jaxrl_llm.types import Params, TrainState


def deviations(
  spec: StepSpec, flow: Flow, state: TrainState, params: Params, microbatch: Microbatch
) -> jax.Array:
  """Squared velocity deviations [Z, U] of the predicted tokens, means over layers; no gradient of the policy.

  The target of a token is the hidden state that reads it, the context the one that predicted it. The last token of a
  row is not read, and has no meaning here (`token_inputs.followed`).
  """
  count = spec.model.config.layers
  numbers = flow.numbers(count)
  weights = jax.lax.stop_gradient(policy_weights(spec, state.base, state.params))
  hidden_ZxUxND = packed_hidden_states(spec, weights, microbatch, shown=numbers)
  hidden_ZxUxND = jax.lax.stop_gradient(hidden_ZxUxND.astype(jnp.float32))
  next_ZxU = _next(microbatch)
  read_ZxUxND = jnp.take_along_axis(hidden_ZxUxND, next_ZxU[..., None], axis=1)
  noise_ZxUxND = _noise(state, microbatch, next_ZxU, hidden_ZxUxND.shape[-1])
  by_layer = lambda x: jnp.split(x, len(numbers), axis=-1)  # noqa: E731
  layers = zip(numbers, *map(by_layer, (read_ZxUxND, hidden_ZxUxND, noise_ZxUxND)), strict=True)
  time = jnp.float32(flow.time)
  deviation = jax.checkpoint(flow_head.deviation)  # activations of one layer's latents at a time
  found = [
    deviation(params, target, context, noise, time, jnp.float32(number / count))
    for number, target, context, noise in layers
  ]
  return sum(found[1:], found[0]) / len(found)


def _next(microbatch: Microbatch) -> jax.Array:
  """Where the token after each predicted token is predicted, int32 [Z, U]; at the end of a row any place."""
  layout = microbatch.layout
  T = layout.index_FxT.shape[-1]
  pick = jax.vmap(lambda index, row, place: index[row, jnp.minimum(place + 1, T - 1)])
  return pick(layout.index_FxT, layout.predicted_row_U, layout.predicted_place_U)


def _noise(state: TrainState, microbatch: Microbatch, next_ZxU: jax.Array, width: int) -> jax.Array:
  """N(0, 1) [Z, U, width] by seed, step and the number of the token that is read."""
  Z = next_ZxU.shape[0]
  identity_ZxNS = microbatch.identity_RxS.reshape(Z, -1)
  identity_ZxU = jnp.take_along_axis(identity_ZxNS, microbatch.layout.source_U, axis=1)
  identity_ZxU = jnp.take_along_axis(identity_ZxU, next_ZxU, axis=1)
  key = jax.random.fold_in(jax.random.key(state.seed), state.step)
  draw = lambda number: jax.random.normal(jax.random.fold_in(key, number), (width,))  # noqa: E731
  return jax.vmap(jax.vmap(draw))(identity_ZxU)
