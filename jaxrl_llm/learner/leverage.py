"""How far each row would move the weights: the input of advantages that need the norms of gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective
from jaxrl_llm.learner import microbatch
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.types import Batch, Params


def row_leverage(spec: StepSpec, params: Params, batch: Batch, base: Params = None) -> jax.Array:
  """log(w·n) [B] with w = π/π_b and n = ‖∇ log π‖ of each row's completion; −∞ for an empty one.

  A pass row by row that keeps the norm of each gradient: the memory of one gradient, the time of separate rows. Rows
  are taken one at a time on several devices, too. arXiv:2602.17616 (VCPO).
  """
  repeats = batch.rollout.length_B.shape[0] // batch.prompts.length_P.shape[0]
  prompts = jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=0), batch.prompts)
  rollout = batch.rollout

  def of_row(row):
    prompt, tokens_T, behavior_T, sampled_T, expert_TxNxk = row
    real_T = sampled_T > 0

    def completion_logp(params):
      weights = microbatch.policy_weights(spec, base, params)
      prompts, expert = jax.tree.map(lambda x: x[None], (prompt, expert_TxNxk))
      logp_1xT, _ = microbatch.log_probs(
        spec, weights, prompts, tokens_T[None], expert_BxTxNxk=expert
      )
      return jnp.where(real_T, logp_1xT[0], 0.0).sum()

    logp, grads = jax.value_and_grad(completion_logp)(params)
    log_w = logp - jnp.where(real_T, behavior_T, 0.0).sum()
    return log_w + jnp.log(optax.tree.norm(grads))

  sampled_BxT = objective.sampled_mask(rollout)
  rows = prompts, rollout.tokens_BxT, rollout.logp_BxT, sampled_BxT, rollout.expert_BxTxNxk
  return jax.lax.map(of_row, rows)
