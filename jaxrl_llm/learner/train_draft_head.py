"""Training of the draft head in the update: forward passes over some of the rollouts, and one optimizer step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.learner.microbatch import accumulate, pack, packed_hidden_states, policy_weights
from jaxrl_llm.learner.slice_sums import accumulate_sums
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import linear
from jaxrl_llm.rollout.draft_head import DraftHeadState, DraftSums, PredictedTokens
from jaxrl_llm.types import Batch, Metrics, TrainState


@jax.named_scope('draft_head')
def train_draft_head(
  spec: StepSpec, state: TrainState, batch: Batch
) -> tuple[DraftHeadState, Metrics]:
  """One step on the first rollouts of each prompt, with the weights that sample next; no gradient reaches these.

  Hidden states are computed again, for a microbatch at a time: recorded while sampling, those of all tokens would be as
  large as a layer of the update, and of the weights before this update.
  """
  head, current = spec.rollout.drafts.head, state.rollout_head
  assert head is not None
  policy = jax.lax.stop_gradient(policy_weights(spec, state.base, state.params))
  if spec.update.quantize:
    policy = linear.straight_through(policy, spec.model.weights_dtype, spec.model.dtype)
  length_B = batch.rollout.length_B
  member_B = jnp.arange(len(length_B)) % spec.layout.group
  length_B = jnp.where(member_B < head.rollouts, length_B, 0)
  count_K = head.counts(length_B)

  def add(total, microbatch, _):
    layout = microbatch.layout
    inputs = PredictedTokens(
      packed_hidden_states(spec, policy, microbatch),
      microbatch.target_ZxU,
      layout.predicted_place_U,
      layout.used,
    )

    def loss(params):
      return head.loss(
        spec.model.config,
        params,
        policy,
        inputs,
        count_K,
        temperature=spec.rollout.decode.temperature,
        chunk_tokens=spec.model.head_chunk_tokens,
        dtype=spec.model.dtype,
      )

    return jax.tree.map(jnp.add, total, jax.grad(loss, has_aux=True)(current.params))

  zeros = jax.tree.map(jnp.zeros_like, (current.params, DraftSums(count_K, count_K[0], count_K[0])))
  packed = pack(spec, batch, length_B > 0)
  over_rows = accumulate_sums if spec.layout.slices > 1 else accumulate
  grads, sums = over_rows(spec, packed, (), add, zeros)
  return head.learn(current, grads, sums, count_K)
