"""Earlier completions as drafts: one forward pass accepts their first tokens, and rows begin from these."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import logprob, shared_prompt_forward
from jaxrl_llm.rollout import early_exit, exit_signals, sampling
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, Params, Prompts, Rollout, TrainState

_VERIFY_KEY = 2**31 - 1  # folded into the key: verification and sampling have separate noise


def verify_drafts(
  spec: StepSpec,
  params: Params,
  state: TrainState,
  prompts: Prompts,
  draft: Rollout,
  begun: Rollout | None,
  cap: jax.Array,
) -> tuple[Rollout, jax.Array]:
  """Rows to continue, and the number of draft tokens that they keep. Rows with tokens in `begun` take no draft."""
  exit_rule = spec.rollout.decode.exit_rule
  key, has_exit_rule = jax.random.key(state.seed), exit_rule is not None
  uniform_BxT, noise_BxT = _uniforms(spec, key, prompts, draft)
  token_BxT, logp_BxT, *signals = _verify_tokens(
    spec, params, prompts, draft, uniform_BxT, noise_BxT, has_exit_rule
  )
  rows, accepted_B = _accepted_rows(
    draft, token_BxT, logp_BxT, state.step, spec.rollout.decode.end_ids, cap
  )
  if exit_rule is not None:
    keys_B = sampling.row_keys(key, prompts, spec.rollout.decode.rollouts)
    rows = rows._replace(
      memory_BxM=jnp.zeros((len(rows.length_B), early_exit.MEMORY_SIZE), jnp.float32)
    )
    cap_B = jnp.broadcast_to(cap, rows.length_B.shape)
    entropy_BxT, margin_BxT = signals
    rows = _blanked(
      exit_signals.replay_rule(exit_rule, rows, entropy_BxT, margin_BxT, cap_B, keys_B)
    )
  accepted_B = jnp.minimum(accepted_B, rows.length_B)
  if begun is not None:
    has_tokens_B = begun.length_B > 0
    pick = lambda old, new: jnp.where(  # noqa: E731
      has_tokens_B.reshape(-1, *[1] * (new.ndim - 1)), old, new
    )
    rows = jax.tree.map(pick, begun, rows)
    accepted_B = jnp.where(has_tokens_B, 0, accepted_B)
  return rows, accepted_B.sum().astype(jnp.float32)


def _uniforms(
  spec: StepSpec, key: jax.Array, prompts: Prompts, draft: Rollout
) -> tuple[jax.Array, jax.Array]:
  """Uniforms [B, T] that decide on acceptance, and those that drew the draft's tokens, or zeros."""
  T, G = draft.tokens_BxT.shape[1], spec.rollout.decode.rollouts
  keys_B = sampling.row_keys(jax.random.fold_in(key, _VERIFY_KEY), prompts, G)
  uniform_BxT = jax.vmap(lambda t: sampling.uniforms(keys_B, t), out_axes=1)(jnp.arange(T))
  noise_BxT = jnp.zeros_like(uniform_BxT)
  if spec.rollout.drafts.records_noise and draft.noise_BxT is not None:
    noise_BxT = sampling.redraw(key, prompts, G, draft.noise_BxT)
  return uniform_BxT, noise_BxT


def _verify_tokens(
  spec: StepSpec,
  params: Params,
  prompts: Prompts,
  draft: Rollout,
  uniform_BxT: jax.Array,
  noise_BxT: jax.Array,
  has_exit_rule: bool,
) -> tuple[jax.Array, ...]:
  """(tokens, their log-probs) by the rule `verify`: an accepted token, or its replacement; with signals of exits."""
  verify, model = spec.rollout.drafts.verify, spec.model.config
  assert verify is not None

  def verified(logits, *columns):
    drawn = verify(logits, *columns, spec.rollout.decode.temperature)
    return *drawn, *(exit_signals.token_signals(logits) if has_exit_rule else ())

  return logprob.over_logits(
    verified,
    model,
    params,
    shared_prompt_forward.hidden(model, params, prompts, draft.tokens_BxT, dtype=spec.model.dtype),
    draft.tokens_BxT,
    draft.logp_BxT,
    uniform_BxT,
    noise_BxT,
    chunk_tokens=spec.model.head_chunk_tokens,
    dtype=spec.model.dtype,
  )


def _accepted_rows(
  draft: Rollout,
  token_BxT: jax.Array,
  logp_BxT: jax.Array,
  version: jax.Array,
  end_ids: tuple[int, ...],
  cap: jax.Array,
) -> tuple[Rollout, jax.Array]:
  """Drafts up to their first rejected token, with its replacement; and the number of accepted tokens [B].

  No row exceeds the cap. The last token and the cap of this step decide whether a row is finished, not the reason that
  the draft recorded. arXiv:2509.23232 (SPEC-RL).
  """
  column_BxT = jnp.arange(draft.tokens_BxT.shape[1])[None]
  most_B = jnp.minimum(draft.length_B, cap)
  same_BxT = (token_BxT == draft.tokens_BxT) & (column_BxT < most_B[:, None])
  accepted_B = jnp.cumprod(same_BxT, axis=1).sum(1).astype(jnp.int32)
  replaced_BxT = (
    (column_BxT == accepted_B[:, None]) & (column_BxT < most_B[:, None]) & (token_BxT >= 0)
  )
  length_B = accepted_B + replaced_BxT.any(1)
  last_B = jnp.take_along_axis(token_BxT, jnp.maximum(length_B - 1, 0)[:, None], axis=1)[:, 0]
  stopped_B = (length_B > 0) & jnp.isin(last_B, jnp.asarray(end_ids, jnp.int32))
  reason_B = jnp.where(length_B >= cap, TRUNCATED, UNFINISHED)
  rows = Rollout(
    token_BxT,
    logp_BxT,
    length_B,
    jnp.where(stopped_B, STOPPED, reason_B).astype(jnp.int8),
    jnp.full_like(draft.version_BxT, version),
    jnp.ones_like(draft.weight_B),
    draft.feature_BxF,
    noise_BxT=draft.noise_BxT,
  )
  return _blanked(rows), accepted_B


def _blanked(rollout: Rollout) -> Rollout:
  """The rows with zeros behind their last tokens."""
  T = rollout.tokens_BxT.shape[1]
  real_BxT = jnp.arange(T)[None] < rollout.length_B[:, None]
  blank = lambda x_BxT: jnp.where(real_BxT, x_BxT, 0).astype(x_BxT.dtype)  # noqa: E731
  return rollout._replace(
    tokens_BxT=blank(rollout.tokens_BxT),
    logp_BxT=blank(rollout.logp_BxT),
    version_BxT=blank(rollout.version_BxT),
  )
