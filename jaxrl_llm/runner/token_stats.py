"""What each token of a landed batch counts, for whoever reads the rollouts: log-prob, advantage, coefficient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import decoders

from jaxrl_llm import objective
from jaxrl_llm.learner.microbatch import by_prompt, by_row
from jaxrl_llm.learner.step_spec import Program
from jaxrl_llm.types import Batch

# What an update has to work out first: with these in it nothing here could be told truly.
_UNKNOWN_ADVANTAGE = {'norms', 'values', 'process', 'teacher'}
_UNKNOWN_COEFFICIENT = {'reference', 'average', 'entropy', 'confidence', 'step', 'demo'}


class Ledger:
  """Token by token, of the first whole groups of a step that `tokens` has room for.

  The coefficient is the one at which the update begins: that of the policy that sampled, where every ratio is 1.
  What depends on another model's or the update's own passes is left out, and so is everything where batches wait or
  replayed rows join them, since what is learned then is another batch.
  """

  def __init__(self, program: Program, config: Any, backend: Any):
    """`backend` is the tokenizer's own; config.monitoring.rollouts_tokens bounds what is told of a step."""
    self._tokens, self._backend = config.monitoring.rollouts_tokens, backend
    self._advantage, self._coefficient = told(program, config)
    self._host = _host()
    if self._host is None and config.mode == 'lag':  # would wait for the step that runs meanwhile
      self._advantage = False
    self._compiled = jax.jit(lambda batch: counted(program, batch, self._coefficient))

  def __call__(self, batch: Batch, texts: list[str]) -> dict[int, dict[str, Any]]:
    """row → dict(cuts=characters of each token, logp=, advantage=, coefficient=); {} beyond the bound. Source: none."""
    rows = self._within(batch)
    if not len(rows):
      return {}
    arrays = dict(logp=batch.rollout.logp_BxT)
    if self._advantage:
      with jax.default_device(self._host):
        arrays |= self._compiled(batch)
    arrays = {k: significant(np.asarray(v)[: rows[-1] + 1]) for k, v in arrays.items()}
    return {int(b): self._row(batch, arrays, b, texts[b]) for b in rows}

  def _within(self, batch: Batch) -> np.ndarray:
    length_B = np.asarray(batch.rollout.length_B)
    group = len(length_B) // len(batch.prompts.index_P)
    total_P = np.cumsum(length_B.reshape(-1, group).sum(1))
    fit_B = np.repeat(total_P <= self._tokens, group)
    return np.flatnonzero(fit_B & (length_B > 0))

  def _row(self, batch: Batch, arrays: dict, b: int, text: str) -> dict[str, Any]:
    length = int(batch.rollout.length_B[b])
    said = np.ones(length, bool)
    if batch.rollout.turns is not None:
      said = batch.rollout.turns.number_BxT[b, :length] >= 0
    row = {k: _numbers(v[b, :length], said) for k, v in arrays.items()}
    row |= {k: _short(row[k]) for k in row if k != 'logp'}
    cuts = self._cuts(batch.rollout.tokens_BxT[b, :length].tolist())
    # A text that begins with what the reply was told, or was cut afterwards, is not these tokens' text.
    return row | dict(cuts=cuts) if sum(cuts) == len(text) else row

  def _cuts(self, ids: list[int]) -> list[int]:
    """Characters that each token adds to the text; a character of several tokens is the last one's."""
    stream = decoders.DecodeStream(skip_special_tokens=True)
    return [len(stream.step(self._backend, token) or '') for token in ids]


def significant(x: np.ndarray, digits: int = 4) -> np.ndarray:
  """x, float64, rounded so that each number is written with that many digits at most. Source: none."""
  x = x.astype(float)
  with np.errstate(divide='ignore', invalid='ignore'):
    power = np.clip(digits - 1 - np.floor(np.log10(np.abs(x))), -20, 20)
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)
    # A quotient of whole numbers is the double nearest to the decimal, which is then written short.
    return np.where(np.isfinite(x) & (x != 0), np.rint(x * up / down) * down / up, x)


def _numbers(values_T: np.ndarray, said_T: np.ndarray) -> list[float | None]:
  """None for what an environment said, and for what is not finite."""
  told = np.isfinite(values_T) & said_T
  if told.all():
    return values_T.tolist()
  return [x if ok else None for x, ok in zip(values_T.tolist(), told, strict=True)]


def _short(values: list) -> Any:
  """One number where it is that of every token."""
  return values[0] if len(set(values)) == 1 else values


def _host() -> jax.Device | None:
  """A device that no step runs on, where accelerators do that; None where jax was told to have no other."""
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError:
    return None


def told(program: Program, config: Any) -> tuple[bool, bool]:
  """Whether advantages, and whether coefficients, can be told before the update. Source: none."""
  method, waits = program.method, config.replay.collect.fn != 'none'
  other = waits or program.group != program.generate.rollouts or method.auxiliary_model is not None
  advantage = not other and not (method.needs & _UNKNOWN_ADVANTAGE)
  return advantage, advantage and not (method.needs & _UNKNOWN_COEFFICIENT)


def counted(program: Program, batch: Batch, coefficients: bool) -> dict[str, jax.Array]:
  """advantage [B, T] and coefficient [B, T], minibatch by minibatch as the update will see them.

  Source: by the functions chosen.
  """
  U, G = program.minibatches, program.generate.rollouts
  cut = jax.tree.map(
    lambda x: jnp.asarray(x).reshape(x.shape[0] // U, U, *x.shape[1:]).swapaxes(0, 1),
    by_prompt(program, batch),
  )

  def one(piece: Batch) -> dict[str, jax.Array]:
    piece = by_row(piece)
    target = objective.targets(program.method, piece, G, None, None, program.parts)
    if program.method.needs_versions:
      zero_BxT = jnp.zeros_like(piece.rollout.version_BxT)
      target = target._replace(age_BxT=zero_BxT, moved_BxT=zero_BxT)
    made = dict(advantage=target.advantage_BxT)
    if coefficients:
      made['coefficient'] = objective.coefficients(program.method, target, target.behavior_BxT)[0]
    return made

  def joined(x):  # [U, B / U, T] → [B, T]
    x = x.reshape(U, -1, G, x.shape[-1]).swapaxes(0, 1)
    return x.reshape(-1, x.shape[-1])

  return jax.tree.map(joined, jax.lax.map(one, cut))
