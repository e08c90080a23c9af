"""A batch, and its log-probs and gradients in the update, by whole rows or packed: no kernel may change them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import data
from jaxrl_llm.learner import microbatch
from jaxrl_llm.types import Batch, Prompts

P, G, L, T, VOCAB = 4, 2, 7, 9, 40


def batch():
  """Rows of many lengths: some share a bin with rows of their own and of other prompts."""
  r = np.random.default_rng(1)
  length_P, length_B = np.array([4, 7, 1, 6]), np.array([9, 2, 5, 9, 1, 3, 7, 4])
  index_P = np.arange(P, dtype=np.int32)
  prompts = Prompts(
    r.integers(0, VOCAB, (P, L)).astype(np.int32), length_P.astype(np.int32), index_P, 0 * index_P,
    np.zeros(P, np.float32),
  )  # fmt: skip
  tokens_BxT = r.integers(0, VOCAB, (P * G, T)).astype(np.int32)
  ones_B = np.ones(P * G, np.float32)
  rollout = data.as_rollout(tokens_BxT, length_B.astype(np.int32))
  return jax.tree.map(jnp.asarray, Batch(prompts, rollout, ones_B, ones_B))


def whole_rows(p, params, batch):
  """The gradient of the sum of all log-probabilities, and these with the entropies; no row is packed."""
  real = jnp.arange(T)[None] < batch.rollout.length_B[:, None]

  def loss(params):
    outputs = microbatch.log_probs(p, params, batch.prompts, batch.rollout.tokens_BxT)
    outputs = [jnp.where(real, x, 0.0) for x in outputs]
    return outputs[0].sum(), outputs

  return jax.grad(loss, has_aux=True)(params)


def packed_rows(p, params, batch):
  """As `whole_rows`, by microbatch."""
  packed = microbatch.pack(p, batch)

  def add(total, one, _):
    real_ZxU = jnp.arange(one.target_ZxU.shape[1])[None] < one.layout.used[:, None]
    loss = lambda x: jnp.where(real_ZxU, microbatch.packed_log_probs(p, x, one)[0], 0.0).sum()  # noqa: E731
    return jax.tree.map(jnp.add, total, jax.grad(loss)(params))

  zeros = jax.tree.map(jnp.zeros_like, params)
  slope = microbatch.accumulate(p, packed, (), add, zeros)
  return slope, list(microbatch.all_log_probs(p, params, packed))
