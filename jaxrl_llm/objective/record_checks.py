"""Assertions on records at public interfaces: shapes, ranks and types, and in debug mode finite numbers.

Shapes and types are static: they are checked while a program is traced, at no cost at run time. A failure is an
AssertionError, an error of the caller and not of the user's input.
"""

from __future__ import annotations

import chex
import jax
import numpy as np

from jaxrl_llm.types import Array, Batch, Prompts, Rollout


def prompts(prompts: Prompts, types: bool = True) -> None:
  """Asserts that every field of `prompts` has one entry for each of P prompts, and the right type."""
  chex.assert_rank(prompts.tokens_PxL, 2)
  P = prompts.tokens_PxL.shape[0]
  integers = prompts.length_P, prompts.index_P, prompts.born_P
  chex.assert_shape([*integers, prompts.expected_P], (P,))
  if types:
    chex.assert_type([prompts.tokens_PxL, *integers], int)
    chex.assert_type(prompts.expected_P, float)
  optional = (prompts.part_P, int), (prompts.weight_P, float), (prompts.context_P, int)
  for array, kind in (*optional, (prompts.hint_P, float)):
    if array is not None:
      chex.assert_shape(array, (P,))
      chex.assert_type(array, kind)


def rollout(rollout: Rollout, types: bool = True) -> None:
  """Asserts that every field of `rollout` has B rows and T tokens, and the right type."""
  chex.assert_rank(rollout.tokens_BxT, 2)
  B, T = rollout.tokens_BxT.shape
  tokens = rollout.tokens_BxT, rollout.version_BxT
  chex.assert_shape([*tokens, rollout.logp_BxT], (B, T))
  chex.assert_shape([rollout.length_B, rollout.reason_B, rollout.weight_B], (B,))
  if types:
    chex.assert_type([*tokens, rollout.length_B, rollout.reason_B], int)
    chex.assert_type([rollout.logp_BxT, rollout.weight_B], float)
  chex.assert_shape(rollout.feature_BxF, (B, None))
  if rollout.turns is not None:
    number, reward, state, outcome = rollout.turns
    chex.assert_shape([number, reward, state], (B, T))
    chex.assert_shape(outcome, (B,))
  if rollout.memory_BxM is not None:
    chex.assert_shape(rollout.memory_BxM, (B, None))
  if rollout.noise_BxT is not None:
    chex.assert_shape(rollout.noise_BxT, (B, T))
  if rollout.expert_BxTxNxk is not None:
    chex.assert_shape(rollout.expert_BxTxNxk, (B, T, None, None))
  if rollout.top_id_BxTxK is not None:
    chex.assert_shape(rollout.top_id_BxTxK, (B, T, None))
    chex.assert_equal_shape([rollout.top_id_BxTxK, rollout.top_logp_BxTxK])


def batch(batch: Batch, types: bool = True) -> None:
  """Asserts that a batch has whole groups: B rows, the same number for each of P prompts, and one reward a row.

  Formulas accept numbers of any type; they are checked with `types=False`.
  """
  prompts(batch.prompts, types)
  rollout(batch.rollout, types)
  P, B = len(batch.prompts.tokens_PxL), len(batch.rollout.tokens_BxT)
  chex.assert_is_divisible(B, P)
  chex.assert_shape([batch.reward_B, batch.correct_B], (B,))
  if types:
    chex.assert_type([batch.reward_B, batch.correct_B], float)
  chex.assert_shape([x for x in (batch.replayed_B, batch.imitation_B) if x is not None], (B,))
  if batch.solutions is not None:
    chex.assert_shape(batch.solutions.tokens_BxL, (B, None))
    chex.assert_shape(batch.solutions.length_B, (B,))
  if batch.teacher_tokens is not None:
    tokens = batch.teacher_tokens
    chex.assert_shape([tokens.prompt_BxL, tokens.tokens_BxE, tokens.span_BxE], (B, None))
    chex.assert_equal_shape([tokens.tokens_BxE, tokens.span_BxE])
    chex.assert_shape([tokens.prompt_length_B, tokens.length_B], (B,))
    chex.assert_equal_shape([tokens.own_span_BxT, batch.rollout.tokens_BxT])
  if batch.parts_BxK is not None:
    chex.assert_shape(batch.parts_BxK, (B, None))
  if batch.demo is not None:
    rollout(batch.demo, types)
    chex.assert_shape(batch.demo.length_B, (P,))


def tokens(mask_BxT: jax.Array, *arrays_BxT: Array | None) -> None:
  """Asserts that per-token arrays are floats with the shape of the mask; None is skipped."""
  arrays = [array for array in arrays_BxT if array is not None]
  chex.assert_equal_shape([mask_BxT, *arrays])
  chex.assert_type(arrays, float)


def finite(batch: Batch) -> None:
  """With JAX_DEBUG_NANS, asserts that rewards, log-probs and weights of a batch on the host are finite."""
  if jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue]
    rows = batch.rollout
    numbers = dict(logp_BxT=rows.logp_BxT, weight_B=rows.weight_B, reward_B=batch.reward_B)
    chex.assert_tree_all_finite(jax.tree.map(np.asarray, numbers))
