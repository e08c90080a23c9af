"""Verification of drafts: completions of an earlier visit, kept up to the first rejected token.

The functions are named in `config.rollout.draft.fn`. Each reads the logits of every draft token and returns (token,
log π_new), [B, T]: the draft's token where it is accepted, else its replacement, or −1 where the decode loop samples
it. Recorded is the log-probability under the current policy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import sampling


def none() -> None:
  """No drafts."""


def lenient(
  logits_BxTxV: jax.Array,
  token_BxT: jax.Array,
  logp_BxT: jax.Array,
  uniform_BxT: jax.Array,
  noise_BxT: jax.Array,
  temperature: float,
  *,
  lenience: float,
) -> tuple[jax.Array, jax.Array]:
  """Token t is accepted iff log u ≤ log π_new − log π_old + ln ℓ, u uniform.

  ℓ → ∞ accepts every draft, ℓ = 0 none. ℓ = 1 is the rule of speculative sampling except for the replacement of the
  first rejected token. It is drawn from π_new and not from the residual (π_new − π_old)⁺. So the result is no exact
  sample of π_new, as in the official code. The paper has ℓ = e^0.5 with GRPO and e^0.15 with DAPO.
  arXiv:2509.23232 (SPEC-RL).
  """
  logits_BxTxV = logits_BxTxV / temperature
  picked_BxT = jnp.take_along_axis(logits_BxTxV, token_BxT[..., None], axis=-1)[..., 0]
  new_BxT = picked_BxT - jax.nn.logsumexp(logits_BxTxV, axis=-1)
  accepted_BxT = jnp.log(uniform_BxT) <= new_BxT - logp_BxT + jnp.log(jnp.float32(lenience))
  return jnp.where(accepted_BxT, token_BxT, -1), new_BxT


def coupled(
  logits_BxTxV: jax.Array,
  token_BxT: jax.Array,
  logp_BxT: jax.Array,
  uniform_BxT: jax.Array,
  noise_BxT: jax.Array,
  temperature: float,
) -> tuple[jax.Array, jax.Array]:
  """Token t is accepted iff π_new draws it from the uniform that drew it first, else replaced by the token drawn.

  Exact (common random numbers): every token is drawn from π_new by a uniform that no earlier token depends on, for one
  forward pass over the accepted part. Behind it the new visit has its own noise and explores. Where the policy has not
  changed, a visit repeats the same completion, so zero-variance groups stay zero-variance.
  """
  B, T, V = logits_BxTxV.shape
  drawn_N, new_N = sampling.sample(logits_BxTxV.reshape(-1, V), noise_BxT.reshape(-1), temperature)
  return drawn_N.reshape(B, T), new_N.reshape(B, T)
