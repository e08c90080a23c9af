"""Last visit's answers as drafts: verified in one forward pass, kept up to the first rejection, continued from there.

Each function named in `config.rollout.draft.fn` looks at the logits of every draft token and returns (token,
log π_new): the draft's own token where it stays, else the one that takes its place, or −1 where the engine is to draw
that. What is recorded is the log-probability that the policy gives now.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import sampling


def none(logits_BxTxV, token_BxT, logp_BxT, verdict_BxT, noise_BxT, temperature):
  """No drafts are made. Source: none."""
  raise NotImplementedError('never called: without drafts nothing is verified')


def lenient(
  logits_BxTxV: jax.Array,
  token_BxT: jax.Array,
  logp_BxT: jax.Array,
  verdict_BxT: jax.Array,
  noise_BxT: jax.Array,
  temperature: float,
  *,
  lenience: float,
) -> tuple[jax.Array, jax.Array]:
  """Token t stays iff log u ≤ log π_new − log π_old + ln ℓ, u uniform.

  ℓ → ∞ keeps every draft, ℓ = 0 none, and ℓ = 1 is the rule of speculative sampling but for the token
  at the cut: it comes from π_new and not from the residual (π_new − π_old)⁺, so the whole is not an
  exact sample of π_new, here as in the official code. Its own defaults: ℓ = e^0.5 with GRPO, e^0.15
  with DAPO. Source: arXiv:2509.23232 (SPEC-RL).
  """
  logits_BxTxV = logits_BxTxV / temperature
  picked_BxT = jnp.take_along_axis(logits_BxTxV, token_BxT[..., None], axis=-1)[..., 0]
  new_BxT = picked_BxT - jax.nn.logsumexp(logits_BxTxV, axis=-1)
  stays_BxT = jnp.log(verdict_BxT) <= new_BxT - logp_BxT + jnp.log(jnp.float32(lenience))
  return jnp.where(stays_BxT, token_BxT, -1), new_BxT


def coupled(
  logits_BxTxV: jax.Array,
  token_BxT: jax.Array,
  logp_BxT: jax.Array,
  verdict_BxT: jax.Array,
  noise_BxT: jax.Array,
  temperature: float,
) -> tuple[jax.Array, jax.Array]:
  """Token t stays iff π_new draws it from the very uniform that drew it first, and gives way to what it draws.

  Exact: every token is drawn from π_new by a uniform that nothing before it depends on, for the price of one forward
  pass over what stayed. Behind the cut the noise is that of the new visit, so that exploration goes on there; before
  it an answer is repeated on purpose. As far as the policy draws what it drew, a visit brings the same answer again: a
  prompt on which the policy no longer changes is sampled anew in name only, and groups that are all right or all wrong
  stay so. Common random numbers.
  """
  B, T, V = logits_BxTxV.shape
  drawn_N, new_N = sampling.sample(logits_BxTxV.reshape(-1, V), noise_BxT.reshape(-1), temperature)
  return drawn_N.reshape(B, T), new_N.reshape(B, T)
