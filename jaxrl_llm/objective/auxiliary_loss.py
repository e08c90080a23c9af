"""Auxiliary models beside the policy: a critic, a reward for each token, or a flow of latents, and their losses.

Every public function may be named in `config.objective.auxiliary_model.fn`. It returns an AuxiliaryModel: the signal
that credit assignment reads, the base that log-probs are compared with, and the loss. The model starts as a copy of the
policy, a flow as a small network; `jaxrl_llm/learner/auxiliary_model.py` runs it. A loss takes the model's output,
values, log-probabilities or deviations, and AuxiliaryTargets, and returns a number and sums for the log. Both add up
over microbatches, except for a loss that `compares_rows` of the minibatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import followed, present, row_mean, row_sum
from jaxrl_llm.types import UserError


class AuxiliaryTargets(NamedTuple):
  """Targets of an auxiliary model in a minibatch. Every array leads with B; weights include the denominators."""

  mask_BxT: jax.Array  # float, 1 for sampled tokens
  weight_BxT: jax.Array  # mask / all tokens of the minibatch
  weight_B: jax.Array  # 1 / rows of the minibatch; 0 for an empty row
  correct_B: jax.Array
  base_BxT: jax.Array | None = None  # log-probabilities that those of the model are compared with
  old_BxT: jax.Array | None = None  # values before the update
  return_BxT: jax.Array | None = None  # regression target of the values
  c_BxT: jax.Array | None = None  # slope of a loss that compares rows, from the whole minibatch


Loss: TypeAlias = tuple[jax.Array, dict[str, jax.Array]]


class Flow(NamedTuple):
  """A network that predicts velocities between hidden states of the policy, instead of a copy of it."""

  shares: tuple[float, ...]  # places of the layers among all, in [0, 1]
  depth: int  # blocks
  time: float  # 0: noise, 1: the hidden state
  after: int  # optimizer steps of the policy without its signal

  def numbers(self, layers: int) -> tuple[int, ...]:
    """The layers, by number, of a model of so many."""
    return tuple(min(round(share * layers), layers - 1) for share in self.shares)


class AuxiliaryModel(NamedTuple):
  """Static settings of an auxiliary model."""

  # 'values' of future rewards; 'process', a reward for each token; 'deviation' of its latent
  signal_kind: str
  base: str  # 'reference': the first weights; 'behavior': the recorded log-probs; '': none
  loss: Callable[[jax.Array, AuxiliaryTargets, int], Loss]  # (output_BxT, targets, rollouts)
  compares_rows: bool  # the loss compares rows with each other
  beta: float
  learning_rate: float
  flow: Flow | None = None  # None: a copy of the policy

  @property
  def signal_is_first(self) -> bool:
    """The signal of a batch is that of the weights before they learn from it."""
    return self.signal_kind != 'process'

  def signal(self, output_BxT: jax.Array, targets: AuxiliaryTargets) -> jax.Array:
    """V, q = beta·(log φ − log base), or the deviation, [B, T]; 0 where the mask is 0."""
    if self.signal_kind == 'process':
      output_BxT = self.beta * (output_BxT - present(targets.base_BxT))
    return jnp.where(targets.mask_BxT > 0, output_BxT, 0.0)


def none() -> None:
  """No auxiliary model."""
  return None


def critic(*, learning_rate: float = 1e-5, clip: float = 0.5) -> AuxiliaryModel:
  """V_t, a linear head on the hidden state; loss ½·max((V − R)², (clip(V, V_old ± clip) − R)²), mean over tokens.

  V is 0 at the start. Advantages use the values from before the update. The defaults are verl's.
  arXiv:1707.06347 (PPO; the clipped values are of its authors' code).
  """
  loss = functools.partial(_critic_loss, clip=clip)
  return AuxiliaryModel('values', '', loss, False, 1.0, learning_rate)


def outcome(*, learning_rate: float = 1e-6, beta: float = 0.05) -> AuxiliaryModel:
  """q = beta·(log φ − log π_first); loss: cross-entropy of σ(Σ_t q) and correctness, mean over rows.

  φ is updated on a batch before its rewards are computed. The defaults are those of the paper's code.
  arXiv:2502.01456 (PRIME).
  """
  loss = functools.partial(_outcome_loss, beta=beta)
  return AuxiliaryModel('process', 'reference', loss, False, beta, learning_rate)


def preference(*, learning_rate: float = 1e-6, beta: float = 0.05) -> AuxiliaryModel:
  """q = beta·(log φ − log π_b); loss −log σ(Σ q of a right row − Σ q of a wrong one), mean over all such pairs.

  Pairs are of one group, and every pair of the minibatch counts the same, as in the paper's code. φ is updated on a
  batch before its rewards are computed. `learning_rate` is not from the paper. arXiv:2509.19199 (iStar).
  """
  loss = functools.partial(_preference_loss, beta=beta)
  return AuxiliaryModel('process', 'behavior', loss, True, beta, learning_rate)


def flow(
  *,
  learning_rate: float = 1e-4,
  shares: Sequence[float] = (0.25, 0.5, 0.75),
  depth: int = 4,
  time: float = 0.8,
  after: int = 0,
) -> AuxiliaryModel:
  """d_t = mean (v(τ·h_t + (1 − τ)·ε) − (h_t − ε))², h_t the latents that read token t; loss: mean of d in right rows.

  v is a network that also reads the latents that predict token t, τ = `time`, ε ~ N(0, 1). Latents are outputs of the
  layers at `shares` of the policy's depth, d is the mean over them, and has no gradient of the policy. Wrong rows count
  in the loss's denominator. A row's last token has no d: the update does not read it; the official code counts it. That
  code begins with a flow trained on other data, here it learns from scratch, and its signal is 0 for the first `after`
  optimizer steps. Raises UserError for settings out of range. arXiv:2510.10201 (RLFR).
  """
  _check(len(shares) > 0 and all(0 <= x <= 1 for x in shares), f'shares={shares} must be in [0, 1]')
  _check(depth > 0, f'depth={depth} must be at least 1')
  _check(0 < time < 1, f'time={time} must be above 0, noise, and below 1, the latent itself')
  _check(after >= 0, f'after={after} must be at least 0 optimizer steps')
  network = Flow(tuple(shares), depth, time, after)
  return AuxiliaryModel('deviation', '', _flow_loss, False, 1.0, learning_rate, network)


def _check(valid: bool, problem: str) -> None:
  if not valid:
    raise UserError(f'config.objective.auxiliary_model.{problem}.')


def _flow_loss(deviation_BxT: jax.Array, targets: AuxiliaryTargets, rollouts: int) -> Loss:
  del rollouts
  read_BxT = followed(targets.mask_BxT)
  right_B = jnp.where(targets.correct_B > 0.5, targets.weight_B, 0.0)
  mean_B = row_mean(deviation_BxT, read_BxT)[:, 0]
  loss = (right_B * mean_B).sum()
  return loss, {'companion/loss': loss, 'companion/deviation': (targets.weight_B * mean_B).sum()}


def _critic_loss(
  value_BxT: jax.Array, targets: AuxiliaryTargets, rollouts: int, *, clip: float
) -> Loss:
  del rollouts
  old_BxT, return_BxT = present(targets.old_BxT), present(targets.return_BxT)
  masked_in = targets.mask_BxT > 0
  value_BxT = jnp.where(masked_in, value_BxT, 0.0)
  near_BxT = old_BxT + jnp.clip(value_BxT - old_BxT, -clip, clip)
  free_BxT = (value_BxT - return_BxT) ** 2
  clipped_BxT = (near_BxT - return_BxT) ** 2

  def mean(x_BxT: jax.Array) -> jax.Array:
    return jnp.where(masked_in, targets.weight_BxT * x_BxT, 0.0).sum()

  loss = 0.5 * mean(jnp.maximum(free_BxT, clipped_BxT))
  return loss, {'critic/vf_loss': loss, 'critic/vf_clipfrac': mean(clipped_BxT > free_BxT)}


def _outcome_loss(
  logp_BxT: jax.Array, targets: AuxiliaryTargets, rollouts: int, *, beta: float
) -> Loss:
  del rollouts
  right_B, total_B = targets.correct_B > 0.5, _row_rewards(logp_BxT, targets, beta)
  loss_B = -jnp.where(right_B, jax.nn.log_sigmoid(total_B), jax.nn.log_sigmoid(-total_B))
  loss = (targets.weight_B * loss_B).sum()
  accuracy = (targets.weight_B * ((total_B > 0) == right_B)).sum()
  return loss, {'companion/loss': loss, 'companion/accuracy': accuracy}


def _preference_loss(
  logp_BxT: jax.Array, targets: AuxiliaryTargets, rollouts: int, *, beta: float
) -> Loss:
  def group(x_B: jax.Array) -> jax.Array:
    return x_B.reshape(-1, rollouts)

  total_PxG = group(_row_rewards(logp_BxT, targets, beta))
  right_PxG, exists_PxG = group(targets.correct_B > 0.5), group(targets.weight_B > 0)
  pairs_PxGxG = (right_PxG & exists_PxG)[:, :, None] & (~right_PxG & exists_PxG)[:, None, :]
  gap_PxGxG = total_PxG[:, :, None] - total_PxG[:, None, :]

  def mean(x_PxGxG: jax.Array) -> jax.Array:
    return jnp.where(pairs_PxGxG, x_PxGxG, 0.0).sum() / jnp.maximum(pairs_PxGxG.sum(), 1)

  loss = mean(-jax.nn.log_sigmoid(gap_PxGxG))
  accuracy = mean((gap_PxGxG > 0).astype(gap_PxGxG.dtype))
  return loss, {'companion/loss': loss, 'companion/accuracy': accuracy}


def _row_rewards(logp_BxT: jax.Array, targets: AuxiliaryTargets, beta: float) -> jax.Array:
  """Σ_t q, [B]."""
  return beta * row_sum(logp_BxT - present(targets.base_BxT), targets.mask_BxT)[:, 0]
