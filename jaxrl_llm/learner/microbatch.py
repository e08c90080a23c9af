"""How a batch is cut into minibatches and slices, and passes over a minibatch slice by slice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import lora
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import logprob, quantized, shared_prompt_forward
from jaxrl_llm.types import Batch, Prompts, TrainState


def policy(spec: StepSpec, base: Any, params: Any) -> Any:
  """Weights for a forward pass: `params`, or where there is a `base`, that with the adapter `params` beside it.

  Source: none.
  """
  return params if base is None else lora.joined(base, params, spec.model.lora.alpha)


def reference(state: TrainState) -> Any:
  """Weights as they began: with LoRA the frozen ones, of which no copy is kept. Source: none."""
  return state.reference if state.base is None else state.base


def by_prompt(spec: StepSpec, batch: Batch) -> Batch:
  """Arrays of rows [B, …] as [P, G, …], so that all leaves lead with P. Source: none."""
  G = spec.layout.group
  group = lambda x: x.reshape(x.shape[0] // G, G, *x.shape[1:])  # noqa: E731
  rows = batch._replace(prompts=None, demo=None)
  return jax.tree.map(group, rows)._replace(prompts=batch.prompts, demo=batch.demo)


def by_row(batch: Batch) -> Batch:
  """Back from `by_prompt`. Source: none."""
  rows = batch._replace(prompts=None, demo=None)
  row = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # noqa: E731
  return jax.tree.map(row, rows)._replace(prompts=batch.prompts, demo=batch.demo)


def slices(spec: StepSpec, batch: Batch, target: Any):
  """Cuts a minibatch into [M, …] slices of `slice_groups` prompts × `slice_rollouts` rows.

  `target` is any tree of arrays that lead with B. Slice m takes every M-th group, so that rows stay on the
  device that holds them. Source: none.
  """
  p, g = spec.update.microbatch.prompts, spec.update.microbatch.rollouts
  repeats = spec.layout.group // g

  def groups(x):  # [P, …] → [M, p, …], a prompt repeated where its group is cut
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
    jax.tree.map(rows, target),
  )


def joined(spec: StepSpec, x: jax.Array) -> jax.Array:
  """[M, rows of a slice, T] as [B, T], each row in its place. Source: none."""
  p, g = spec.update.microbatch.prompts, spec.update.microbatch.rollouts
  return x.reshape(-1, p, g, x.shape[-1]).swapaxes(0, 1).reshape(-1, x.shape[-1])


def rescore(
  spec: StepSpec,
  params: Any,
  prompts: Prompts,
  tokens_BxT: jax.Array,
  noise: Any = None,
  top: int = 0,
  expert_BxTxNxk: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """Log-probability and entropy [B, T] of completions; each prompt is encoded once for its rows.

  Same gradient as a repeated prompt, B / P times fewer prompt tokens. `noise`, `expert`: see `decoder.apply`; `top`:
  see `logprob.token_logp`. Kernels are rounded where the program says so. Source: none.
  """
  if spec.update.quantize:
    params = quantized.straight_through(params, spec.model.weights_dtype, spec.model.dtype)
  return logprob.token_logp(
    spec.model.config,
    params,
    hidden(spec, params, prompts, tokens_BxT, noise, expert_BxTxNxk),
    tokens_BxT,
    temperature=spec.rollout.decode.temperature,
    chunk_tokens=spec.model.head_chunk_tokens,
    dtype=spec.model.dtype,
    top=top,
  )


def hidden(
  spec: StepSpec,
  params: Any,
  prompts: Prompts,
  tokens_BxT: jax.Array,
  noise: Any = None,
  expert_BxTxNxk: jax.Array | None = None,
) -> jax.Array:
  """The hidden state [B, T, D] that predicts each token, as the program computes. Source: none."""
  how = dict(
    dtype=spec.model.dtype, remat=spec.update.remat, noise=noise, attend=spec.update.attention
  )
  how |= dict(
    gather=sharding.layer_gather(spec.layout.mesh, spec.layout.rules), expert_BxTxNxk=expert_BxTxNxk
  )
  return shared_prompt_forward.hidden(spec.model.config, params, prompts, tokens_BxT, **how)


def scores(
  spec: StepSpec, params: Any, batch: Batch, sigma_L=None, key_M=None, top: int = 0
) -> tuple[jax.Array, ...]:
  """What `rescore` tells of a minibatch, each [B, T], slice by slice, without a gradient. Source: none."""
  params = jax.lax.stop_gradient(params)

  def score(piece):
    prompts, tokens_BxT, expert_BxTxNxk, key = piece
    noise = None if key is None else (sigma_L, key)
    return rescore(spec, params, prompts, tokens_BxT, noise, top, expert_BxTxNxk)

  prompts, tokens, _, expert = slices(spec, batch, batch.rollout.expert_BxTxNxk)
  pieces = prompts, tokens, expert, key_M
  return jax.tree.map(lambda x: joined(spec, x), jax.lax.map(score, pieces))


def foreign(batch: Batch) -> Batch:
  """The batch as a model that did not sample it reads it: tokens go where its own routers say. Source: none."""
  return batch._replace(rollout=batch.rollout._replace(expert_BxTxNxk=None))


def leverage(spec: StepSpec, params: Any, batch: Batch, base: Any = None) -> jax.Array:
  """log(w·n) of each row [B]: w = π/π_b of its answer, n = ‖∇ log π(answer)‖ by `params`; −∞ where there is none.

  Row after row, and of each gradient its norm alone is kept: the memory of one gradient, the time of a pass of rows
  alone. Rows that lie on several devices are still taken one at a time. Source: arXiv:2602.17616 (VCPO).
  """
  repeats = batch.rollout.length_B.shape[0] // batch.prompts.length_P.shape[0]
  prompts = jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=0), batch.prompts)
  rollout = batch.rollout

  def pull(row):
    prompt, tokens_T, behavior_T, said_T, expert_TxNxk = row
    real_T = said_T > 0

    def answer(params):
      weights = policy(spec, base, params)
      asked, expert = jax.tree.map(lambda x: x[None], (prompt, expert_TxNxk))
      logp_1xT, _ = rescore(spec, weights, asked, tokens_T[None], expert_BxTxNxk=expert)
      return jnp.where(real_T, logp_1xT[0], 0.0).sum()

    logp, grads = jax.value_and_grad(answer)(params)
    log_w = logp - jnp.where(real_T, behavior_T, 0.0).sum()
    return log_w + jnp.log(optax.tree.norm(grads))

  rows = (
    prompts,
    rollout.tokens_BxT,
    rollout.logp_BxT,
    objective.sampled_mask(rollout),
    rollout.expert_BxTxNxk,
  )
  return jax.lax.map(pull, rows)
