"""How a batch is divided into minibatches and microbatches, and forward passes over a minibatch by microbatch."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import lora
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import logprob, quantized, shared_prompt_forward
from jaxrl_llm.types import Batch, Params, Prompts, TrainState

Tree = TypeVar('Tree')


def policy_weights(spec: StepSpec, base: Params, params: Params) -> Params:
  """Weights for a forward pass: `params`, or with LoRA the frozen `base` beside the adapter `params`."""
  if base is None or spec.model.lora is None:
    return params
  return lora.join(base, params, spec.model.lora.alpha)


def reference_weights(state: TrainState) -> Params:
  """The weights at the start of the run; with LoRA the frozen base, of which there is no copy."""
  return state.reference if state.base is None else state.base


def by_prompt(spec: StepSpec, batch: Batch) -> Batch:
  """The batch with arrays of rows [B, …] as [P, G, …], so that the first axis of every array is P."""
  G = spec.layout.group
  group = lambda x: x.reshape(x.shape[0] // G, G, *x.shape[1:])  # noqa: E731
  rows = batch._replace(prompts=None, demo=None)
  return jax.tree.map(group, rows)._replace(prompts=batch.prompts, demo=batch.demo)


def by_row(batch: Batch) -> Batch:
  """The inverse of `by_prompt`."""
  rows = batch._replace(prompts=None, demo=None)
  row = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # noqa: E731
  return jax.tree.map(row, rows)._replace(prompts=batch.prompts, demo=batch.demo)


def microbatches(
  spec: StepSpec, batch: Batch, arrays: Tree
) -> tuple[Prompts, jax.Array, jax.Array, Tree]:
  """(prompts, tokens, lengths, arrays) of a minibatch as [M, …]: M microbatches.

  `arrays` is any tree of arrays [B, …]. Microbatch m takes every M-th group, so that rows stay on their device.
  """
  p, g = spec.update.microbatch
  repeats = spec.layout.group // g

  def groups(x):  # [P, …] → [M, p, …], with a prompt repeated for each part of its group
    x = jnp.repeat(x, repeats, axis=0)
    return x.reshape(p, x.shape[0] // p, *x.shape[1:]).swapaxes(0, 1)

  def rows(x):  # [B, …] → [M, p·g, …]
    x = x.reshape(p, x.shape[0] // (p * g), g, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(x.shape[0], p * g, *x.shape[3:])

  rollout = batch.rollout
  return (
    jax.tree.map(groups, batch.prompts),
    rows(rollout.tokens_BxT),
    rows(rollout.length_B),
    jax.tree.map(rows, arrays),
  )


def join_microbatches(spec: StepSpec, x: jax.Array) -> jax.Array:
  """[M, rows of a microbatch, T] as [B, T], in the order of the minibatch."""
  p, g = spec.update.microbatch
  return x.reshape(-1, p, g, x.shape[-1]).swapaxes(0, 1).reshape(-1, x.shape[-1])


def log_probs(
  spec: StepSpec,
  params: Params,
  prompts: Prompts,
  tokens_BxT: jax.Array,
  noise: tuple[jax.Array, jax.Array] | None = None,
  top: int = 0,
  expert_BxTxNxk: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """Log-probability and entropy [B, T] of completions, whose prompts are encoded once for all their rows.

  The gradient is that of repeated prompts, with B / P times fewer prompt tokens. `noise` and `expert_BxTxNxk` are
  arguments of `decoder.apply`, `top` of `logprob.token_logp`. With `update.quantize` kernels are rounded.
  """
  if spec.update.quantize:
    params = quantized.straight_through(params, spec.model.weights_dtype, spec.model.dtype)
  return logprob.token_logp(
    spec.model.config,
    params,
    hidden_states(spec, params, prompts, tokens_BxT, noise, expert_BxTxNxk),
    tokens_BxT,
    temperature=spec.rollout.decode.temperature,
    chunk_tokens=spec.model.head_chunk_tokens,
    dtype=spec.model.dtype,
    top=top,
  )


def hidden_states(
  spec: StepSpec,
  params: Params,
  prompts: Prompts,
  tokens_BxT: jax.Array,
  noise: tuple[jax.Array, jax.Array] | None = None,
  expert_BxTxNxk: jax.Array | None = None,
) -> jax.Array:
  """The hidden state [B, T, D] that predicts each token."""
  return shared_prompt_forward.hidden(
    spec.model.config,
    params,
    prompts,
    tokens_BxT,
    dtype=spec.model.dtype,
    remat=spec.update.remat,
    noise=noise,
    attend=spec.update.attention,
    gather=sharding.layer_gather(spec.layout.mesh, spec.layout.rules),
    expert_BxTxNxk=expert_BxTxNxk,
  )


def microbatched_log_probs(
  spec: StepSpec,
  params: Params,
  batch: Batch,
  sigma_L: jax.Array | None = None,
  key_M: jax.Array | None = None,
  top: int = 0,
) -> tuple[jax.Array, ...]:
  """`log_probs` of a minibatch, each result [B, T], microbatch by microbatch and without a gradient."""
  params = jax.lax.stop_gradient(params)

  def score(microbatch):
    prompts, tokens_BxT, expert_BxTxNxk, key = microbatch
    noise = None if key is None or sigma_L is None else (sigma_L, key)
    return log_probs(spec, params, prompts, tokens_BxT, noise, top, expert_BxTxNxk)

  prompts, tokens, _, expert = microbatches(spec, batch, batch.rollout.expert_BxTxNxk)
  inputs = prompts, tokens, expert, key_M
  return jax.tree.map(lambda x: join_microbatches(spec, x), jax.lax.map(score, inputs))


def without_routes(batch: Batch) -> Batch:
  """The batch for weights that did not sample it: their own routers choose the experts."""
  return batch._replace(rollout=batch.rollout._replace(expert_BxTxNxk=None))


def leverage(spec: StepSpec, params: Params, batch: Batch, base: Params = None) -> jax.Array:
  """log(w·n) [B] with w = π/π_b and n = ‖∇ log π‖ of each row's completion; −∞ for an empty one.

  A pass row by row that keeps the norm of each gradient: the memory of one gradient, the time of separate rows. Rows
  are taken one at a time on several devices, too. arXiv:2602.17616 (VCPO).
  """
  repeats = batch.rollout.length_B.shape[0] // batch.prompts.length_P.shape[0]
  prompts = jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=0), batch.prompts)
  rollout = batch.rollout

  def row_leverage(row):
    prompt, tokens_T, behavior_T, sampled_T, expert_TxNxk = row
    real_T = sampled_T > 0

    def completion_logp(params):
      weights = policy_weights(spec, base, params)
      prompts, expert = jax.tree.map(lambda x: x[None], (prompt, expert_TxNxk))
      logp_1xT, _ = log_probs(spec, weights, prompts, tokens_T[None], expert_BxTxNxk=expert)
      return jnp.where(real_T, logp_1xT[0], 0.0).sum()

    logp, grads = jax.value_and_grad(completion_logp)(params)
    log_w = logp - jnp.where(real_T, behavior_T, 0.0).sum()
    return log_w + jnp.log(optax.tree.norm(grads))

  rows = (
    prompts,
    rollout.tokens_BxT,
    rollout.logp_BxT,
    objective.sampled_mask(rollout),
    rollout.expert_BxTxNxk,
  )
  return jax.lax.map(row_leverage, rows)
