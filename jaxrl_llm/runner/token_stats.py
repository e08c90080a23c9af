"""Per-token values of a graded batch for the rollout files: log-prob, advantage, coefficient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import decoders

from jaxrl_llm import objective
from jaxrl_llm.config.schema import Config
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.microbatch import by_prompt, by_row
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.types import Batch, JsonObject

# Inputs of the objective that exist only inside the update. A method that needs one has no value to log before it.
_UNKNOWN_ADVANTAGE = {'norms', 'values', 'process', 'teacher', 'solution', 'reward_reference'}
_UNKNOWN_COEFFICIENT = {
  *('reference', 'average', 'entropy', 'confidence', 'collision', 'step', 'demo'),
}


class TokenStats:
  """Per-token values of the first groups of a step, up to config.monitoring.rollouts_tokens tokens.

  The coefficient is that of the first minibatch pass: policy = sampling policy, every ratio is 1. Values that depend
  on another model or on passes of the update are left out. So is everything where batches wait or replayed rows join
  them, since the update then learns from another batch.
  """

  def __init__(self, spec: StepSpec, config: Config, backend: Any):
    """`backend` is the `tokenizers.Tokenizer` of the model."""
    self._max_tokens, self._backend = config.monitoring.rollouts_tokens, backend
    self._has_advantage, self._has_coefficient = available(spec, config)
    self._device = sharding.host_device()
    if self._device is None and config.mode == 'lag':  # would wait for the step that runs meanwhile
      self._has_advantage = False
    self._compiled = jax.jit(lambda batch: token_values(spec, batch, self._has_coefficient))

  def __call__(self, batch: Batch, texts: list[str]) -> dict[int, JsonObject]:
    """Return row → dict(cuts=characters of each token, logp=, advantage=, coefficient=), a list or one value each."""
    rows = self._rows_within_limit(batch)
    if not len(rows):
      return {}
    arrays = dict(logp=batch.rollout.logp_BxT)
    if self._has_advantage:
      with jax.default_device(self._device):
        arrays |= self._compiled(batch)
    arrays = {k: significant(np.asarray(v)[: rows[-1] + 1]) for k, v in arrays.items()}
    return {int(b): self._row(batch, arrays, b, texts[b]) for b in rows}

  def _rows_within_limit(self, batch: Batch) -> np.ndarray:
    length_B = np.asarray(batch.rollout.length_B)
    group = len(length_B) // len(batch.prompts.index_P)
    total_P = np.cumsum(length_B.reshape(-1, group).sum(1))
    fit_B = np.repeat(total_P <= self._max_tokens, group)
    return np.flatnonzero(fit_B & (length_B > 0))

  def _row(self, batch: Batch, arrays: dict[str, np.ndarray], b: int, text: str) -> JsonObject:
    length = int(batch.rollout.length_B[b])
    sampled_T = np.ones(length, bool)
    if batch.rollout.turns is not None:
      sampled_T = batch.rollout.turns.number_BxT[b, :length] >= 0
    values = {k: _numbers(v[b, :length], sampled_T) for k, v in arrays.items()}
    record: JsonObject = {k: v if k == 'logp' else _collapse(v) for k, v in values.items()}
    cuts = self._cuts(batch.rollout.tokens_BxT[b, :length].tolist())
    # A hinted prefix or a truncation makes the text differ from the text of these tokens.
    return record | dict(cuts=cuts) if sum(cuts) == len(text) else record

  def _cuts(self, token_ids: list[int]) -> list[int]:
    """Characters that each token adds to the text; a character of several tokens belongs to the last one."""
    stream = decoders.DecodeStream(skip_special_tokens=True)
    return [len(stream.step(self._backend, token) or '') for token in token_ids]


def significant(x: np.ndarray, digits: int = 4) -> np.ndarray:
  """Round x to so many significant digits, as float64."""
  x = x.astype(float)
  with np.errstate(divide='ignore', invalid='ignore'):
    power = np.clip(digits - 1 - np.floor(np.log10(np.abs(x))), -20, 20)
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)
    # A quotient of integers is the double nearest to the decimal, which JSON then writes short.
    return np.where(np.isfinite(x) & (x != 0), np.rint(x * up / down) * down / up, x)


def _numbers(values_T: np.ndarray, sampled_T: np.ndarray) -> list[float | None]:
  """None for tokens of an environment and for values that are not finite."""
  valid_T = np.isfinite(values_T) & sampled_T
  if valid_T.all():
    return values_T.tolist()
  return [x if valid else None for x, valid in zip(values_T.tolist(), valid_T, strict=True)]


def _collapse(values: list[float | None]) -> list[float | None] | float | None:
  """A single value where all tokens share it."""
  return values[0] if len(set(values)) == 1 else values


def shaped_rewards(spec: StepSpec, batch: Batch) -> np.ndarray | None:
  """float32 [B], the rewards after config.objective.reward_shaping, by minibatches as in the update.

  None where the host has no device of its own to compute it on. Rows of earlier visits, which join a group in the
  update, are not counted.
  """
  device, shape = sharding.host_device(), spec.objective.method.batch_stages.reward_shaping
  if device is None or shape is None:
    return None
  U, G, P = spec.update.minibatches, spec.rollout.decode.rollouts, len(batch.prompts.index_P)
  shaped_B = np.zeros(P * G, np.float32)
  T = batch.rollout.tokens_BxT.shape[1]
  with jax.default_device(device):
    # Environment tokens do not count as length.
    length_B = np.asarray(objective.sampled_mask(batch.rollout).sum(1), np.int32)
    for first in range(U):
      chosen_P = np.arange(first, P, U)
      rows_B = (chosen_P[:, None] * G + np.arange(G)).ravel()
      prompts = jax.tree.map(lambda x, chosen_P=chosen_P: np.asarray(x)[chosen_P], batch.prompts)
      groups = objective.group_rows(prompts, G, spec.layout.slots_per_prompt)
      inputs = (jnp.asarray(x[rows_B]) for x in (batch.reward_B, batch.correct_B, length_B))
      shaped_B[rows_B] = np.asarray(groups.scatter(shape(*map(groups.gather, inputs), T)))
  return shaped_B


def available(spec: StepSpec, config: Config) -> tuple[bool, bool]:
  """(whether advantages, whether coefficients) are known before the update."""
  method, replay = spec.objective.method, config.replay
  # Batches wait, are joined by other rows, or are weighted anew.
  changed = replay.collect.fn != 'none' or replay.reuse.fn != 'none'
  changed |= config.curriculum.hint.fn == 'corrected'
  divergence = config.objective.divergence.fn != 'none'  # its gradient is none of sampled tokens
  other = changed or divergence or method.auxiliary_model is not None
  advantage = not other and not (method.needs & _UNKNOWN_ADVANTAGE)
  return advantage, advantage and not (method.needs & _UNKNOWN_COEFFICIENT)


def token_values(spec: StepSpec, batch: Batch, coefficients: bool) -> dict[str, jax.Array]:
  """Return advantage [B, T] and, with `coefficients`, coefficient [B, T], by minibatches as in the update."""
  U, G = spec.update.minibatches, spec.rollout.decode.rollouts
  minibatches = jax.tree.map(
    lambda x: jnp.asarray(x).reshape(x.shape[0] // U, U, *x.shape[1:]).swapaxes(0, 1),
    by_prompt(spec, batch),
  )

  def values(minibatch: Batch) -> dict[str, jax.Array]:
    minibatch = by_row(minibatch)
    target = objective.targets(
      spec.objective.method, minibatch, G, None, None, spec.layout.slots_per_prompt
    )
    if spec.objective.method.needs_versions:
      zero_BxT = jnp.zeros_like(minibatch.rollout.version_BxT)
      target = target.with_arrays(age_BxT=zero_BxT, batch_steps_BxT=zero_BxT)
    arrays = dict(advantage=target.advantage_BxT)
    if coefficients:
      arrays['coefficient'] = objective.coefficients(
        spec.objective.method, target, target.behavior_BxT
      )[0]
    return arrays

  def joined(x):  # [U, B / U, T] → [B, T]
    x = x.reshape(U, -1, G, x.shape[-1]).swapaxes(0, 1)
    return x.reshape(-1, x.shape[-1])

  return jax.tree.map(joined, jax.lax.map(values, minibatches))
