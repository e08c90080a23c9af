"""Decoding with pruning: all candidates for a few tokens, then the survivors of each group to their ends."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp

from jaxrl_llm.models import shared_prompt_forward
from jaxrl_llm.rollout import correctness_head, ring_decode, sampling, survival
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings
from jaxrl_llm.rollout.pruning import PruningSettings
from jaxrl_llm.types import ModelConfig, Params, Prompts, Rollout

_SURVIVAL_KEY = 2**31 - 3  # folded into a prompt's key: survivors are drawn with separate noise


def generate(
  model: ModelConfig,
  settings: DecodeSettings,
  inputs: DecodeInputs,
  head: correctness_head.CorrectnessHead,
  pruning: PruningSettings,
) -> tuple[Rollout, jax.Array, jax.Array]:
  """As `ring_decode.generate`, with the survivors' weights and features; also returns the tokens sampled in all.

  A survivor has the tokens that it would have without pruning. A candidate that ends before `at_tokens` is scored at
  its last token. arXiv:2603.24840 (ARRoL).
  """
  prompts, G = inputs.prompts, settings.rollouts
  P, C = len(prompts.index_P), pruning.candidates
  # Pruned groups start at their prompts and have no carried cache.
  inputs = inputs._replace(continued=None, carried=None)
  candidates, iterations = ring_decode.generate(
    model, settings._replace(rollouts=C), inputs._replace(pause=pruning.at_tokens)
  )
  p_B, feature_BxF = predict_success(
    model, inputs.params, head, prompts, candidates, settings.dtype, pruning
  )
  keys_P = sampling.prompt_keys(jax.random.fold_in(inputs.key, _SURVIVAL_KEY), prompts)
  index_PxG, s_PxG = survival.sample_survivors(keys_P, pruning.survival(p_B.reshape(P, C), G), G)
  row_B = (jnp.arange(P)[:, None] * C + index_PxG).reshape(-1)
  survivors = jax.tree.map(lambda x: x[row_B], candidates)
  survivors = survivors._replace(
    weight_B=survivors.weight_B / s_PxG.reshape(-1), feature_BxF=feature_BxF[row_B]
  )
  rollout, more = ring_decode.generate(
    model, settings, inputs._replace(continued=survivors, member_B=index_PxG.reshape(-1))
  )
  tokens = candidates.length_B.sum() + rollout.length_B.sum() - survivors.length_B.sum()
  return rollout, iterations + more, tokens


def predict_success(
  model: ModelConfig,
  params: Params,
  head: correctness_head.CorrectnessHead,
  prompts: Prompts,
  rollout: Rollout,
  dtype: str,
  pruning: PruningSettings,
) -> tuple[jax.Array, jax.Array]:
  """(p_B, feature_BxF): the correctness head's probability of success, and the hidden state that it reads.

  The hidden state is that of token `pruning.at_tokens` of a row, or of its last token. arXiv:2603.24840 (ARRoL).
  """
  n = pruning.at_tokens
  tokens_Bxn = cast(jax.Array, rollout.tokens_BxT)[:, :n]
  hidden_BxnxD = shared_prompt_forward.hidden(model, params, prompts, tokens_Bxn, dtype=dtype)
  last_B = jnp.clip(jnp.minimum(rollout.length_B, n) - 1, 0)
  feature_BxF = jnp.take_along_axis(hidden_BxnxD, last_B[:, None, None], axis=1)[:, 0]
  feature_BxF = feature_BxF.astype(jnp.float32)
  return correctness_head.probability(head, feature_BxF, pruning.warmup_steps), feature_BxF
