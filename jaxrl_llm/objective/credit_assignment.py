"""Credit assignment, from the advantage of a row to its tokens: inputs → (advantage, return_BxT or None).

The advantage is [B, T], or [B, 1] where all tokens of a row share it. The return is the regression target of a critic,
None without one. Means and variances run over the sampled tokens of a minibatch. `needs` declares the signal of an
auxiliary model (`config.objective.auxiliary_model`). Every public function may be named in
`config.objective.credit_assignment.fn`. Detached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import (
  CreditInputs,
  followed,
  group_sum,
  needs,
  present,
  requires,
  row_mean,
  row_sum,
)

Columns: TypeAlias = tuple[jax.Array, ...]  # one position of each array, or what a scan carries


def row() -> None:
  """A_t = the row's advantage at every token. arXiv:2402.03300 (GRPO, outcome supervision)."""


@needs('values')
@requires('the critic is the baseline, and GAE sums the reward itself', advantage=('raw',))
def gae(
  inputs: CreditInputs, *, discount: float = 1.0, trace: float = 1.0, whiten: bool = True
) -> tuple[jax.Array, jax.Array]:
  """A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t; the return is A + V, before A is whitened.

  r is the row's advantage at its last token and 0 before it, so that `advantage.fn=raw` is the reward itself.
  A penalty of `config.objective.reward_kl` is subtracted from each r.
  V_t is the critic's value before token t, and 0 after the last token. γ = `discount`, λ = `trace`; with both 1,
  A = r − V. Whitened as in verl, whose defaults these are: (A − mean) / √(var + 1e-8).
  arXiv:1506.02438 (GAE), arXiv:1707.06347 (PPO).
  """
  mask_BxT = inputs.mask_BxT
  values_BxT = jnp.where(mask_BxT > 0, present(inputs.values_BxT), 0.0)
  ahead_BxT = mask_BxT.sum(1, keepdims=True) - jnp.cumsum(mask_BxT, axis=1)
  # The last sampled token of the row: environment tokens may lie between turns.
  last_BxT = mask_BxT * (ahead_BxT == 0)

  def back(later: Columns, column: Columns) -> tuple[Columns, jax.Array]:
    ahead_B, next_B = later
    reward_B, value_B, mask_B = column
    own_B = reward_B + discount * next_B - value_B + discount * trace * ahead_B
    later = jnp.where(mask_B > 0, own_B, ahead_B), jnp.where(mask_B > 0, value_B, next_B)
    return later, jnp.where(mask_B > 0, own_B, 0.0)

  reward_BxT = inputs.advantage_Bx1 * last_BxT
  if inputs.penalty_BxT is not None:
    reward_BxT -= inputs.penalty_BxT
  columns = reward_BxT.T, values_BxT.T, mask_BxT.T
  nothing = jnp.zeros_like(values_BxT[:, 0])
  _, advantage_TxB = jax.lax.scan(back, (nothing, nothing), columns, reverse=True)
  advantage_BxT = advantage_TxB.T
  returns_BxT = advantage_BxT + values_BxT
  return (_whitened(advantage_BxT, mask_BxT) if whiten else advantage_BxT), returns_BxT


@requires('it whitens R itself', advantage=('raw',))
def return_whitened(inputs: CreditInputs, *, discount: float = 1.0) -> tuple[jax.Array, None]:
  """A_t = Σ_{j≥t} γ^{j−t}·r_j, whitened over all tokens: (A − mean) / √(var + 1e-8), γ = `discount`.

  r is the row's advantage at its last token minus the penalties of `config.objective.reward_kl`. With neither a
  discount nor penalties it is `advantage.fn=token_whitened`. arXiv:2501.03262 (REINFORCE++).
  """
  mask_BxT = inputs.mask_BxT
  ahead_BxT = mask_BxT.sum(1, keepdims=True) - jnp.cumsum(mask_BxT, axis=1)
  reward_BxT = inputs.advantage_Bx1 * mask_BxT * (ahead_BxT == 0)
  if inputs.penalty_BxT is not None:
    reward_BxT -= inputs.penalty_BxT
  return_BxT = _from_behind(
    lambda later, x, mask: jnp.where(mask > 0, x + discount * later, later), (reward_BxT, mask_BxT)
  )
  return _whitened(return_BxT * mask_BxT, mask_BxT) * mask_BxT, None


@needs('process')
@requires(
  'the outcome is R minus the mean of the others, as the process is', advantage=('leave_one_out',)
)
def process(
  inputs: CreditInputs,
  *,
  process: float = 1.0,
  outcome: float = 1.0,
  whiten: bool = True,
  bounded: bool = True,
) -> tuple[jax.Array, None]:
  """A_t = Σ_{j≥t} process·n/(n−1)·(q_j − mean_g of rows' means) + outcome·A_row, then whitened over all tokens.

  q is the auxiliary model's reward of a token; if `bounded`, divided by the largest |Σ_{j≥t} q_j| of the batch. With
  `advantage.fn=leave_one_out` A_row is the outcome's own R − mean of the others. Whitened as in verl:
  (A − mean) / √(var + 1e-8). As in the official code; the paper's q_j − mean of the others is the same in the mean
  over a row. arXiv:2502.01456 (PRIME).
  """
  mask_BxT, group_B = inputs.mask_BxT, inputs.group_B
  q_BxT = jnp.where(mask_BxT > 0, present(inputs.process_BxT), 0.0)
  if bounded:
    q_BxT = q_BxT / (jnp.abs(_ahead(q_BxT, mask_BxT)).max() + 1e-6)
  exists_B = (mask_BxT.sum(1) > 0).astype(mask_BxT.dtype)
  n_B = group_sum(exists_B, group_B)
  mean_B = group_sum(row_mean(q_BxT, mask_BxT)[:, 0] * exists_B, group_B) / jnp.maximum(n_B, 1)
  gain_B = process * n_B / jnp.maximum(n_B - 1, 1)
  step_BxT = gain_B[:, None] * (q_BxT - mean_B[:, None]) * mask_BxT
  advantage_BxT = (_ahead(step_BxT, mask_BxT) + outcome * inputs.advantage_Bx1) * mask_BxT
  return (_whitened(advantage_BxT, mask_BxT) if whiten else advantage_BxT), None


@needs('deviation')
def flow(
  inputs: CreditInputs, *, coef: float = 0.01, threshold: float = 0.6, top: int = 15
) -> tuple[jax.Array, None]:
  """A_t = A_row − coef·Σ_{j≥t} s_j, s = (d − min d) / (max d − min d) over the row, 0 where at most `threshold`.

  d is the deviation of a token's latent from the auxiliary model's flow. Of a row with `top` or more tokens above the
  threshold, the largest `top` count; 0: all. As in the official code, whose numbers these are. arXiv:2510.10201 (RLFR).
  """
  read_BxT = followed(inputs.mask_BxT) > 0
  d_BxT = jnp.where(read_BxT, present(inputs.deviation_BxT), 0.0)
  low_Bx1 = jnp.where(read_BxT, d_BxT, jnp.inf).min(1, keepdims=True)
  span_Bx1 = jnp.where(read_BxT, d_BxT, -jnp.inf).max(1, keepdims=True) - low_Bx1
  share_BxT = jnp.where(read_BxT & (span_Bx1 > 0), (d_BxT - low_Bx1) / span_Bx1, 0.0)
  share_BxT = jnp.where(share_BxT > threshold, share_BxT, 0.0)
  if 0 < top < share_BxT.shape[1]:
    smallest_Bx1 = jax.lax.top_k(share_BxT, top)[0][:, -1:]
    share_BxT = jnp.where(share_BxT >= smallest_Bx1, share_BxT, 0.0)
  penalty_BxT = coef * _ahead(share_BxT, inputs.mask_BxT)
  return (inputs.advantage_Bx1 - penalty_BxT) * inputs.mask_BxT, None


@needs('process')
def steps(
  inputs: CreditInputs, *, weight: float = 1.0, eps: float = 1e-6
) -> tuple[jax.Array, None]:
  """A_t = A_row + weight·(s − mean_g) / (std_g + eps), s = Σ q over the tokens of the step that t is in.

  Mean and unbiased std are over all steps of the group. A step is a turn with an environment
  (config.environment), else the whole row: then this adds a second advantage per row and no finer credit. The paper's
  code also has a variant without the std. arXiv:2509.19199 (iStar, first named OPRL).
  """
  mask_BxT, group_B = inputs.mask_BxT, inputs.group_B
  turn_BxT = inputs.turn_BxT
  if turn_BxT is None:
    turn_BxT = jnp.zeros(mask_BxT.shape, jnp.int32)
  reward_BxS = _by_turn(jnp.where(mask_BxT > 0, present(inputs.process_BxT), 0.0), turn_BxT)
  exists_BxS = (_by_turn(mask_BxT, turn_BxT) > 0).astype(mask_BxT.dtype)
  n_B = group_sum(exists_BxS.sum(1), group_B)
  mean_B = group_sum(reward_BxS.sum(1), group_B) / jnp.maximum(n_B, 1)
  off_BxS = (reward_BxS - mean_B[:, None]) * exists_BxS
  std_B = jnp.sqrt(group_sum((off_BxS**2).sum(1), group_B) / jnp.maximum(n_B - 1, 1))
  step_BxT = jnp.take_along_axis(off_BxS / (std_B[:, None] + eps), turn_BxT, axis=1)
  return (inputs.advantage_Bx1 + weight * step_BxT) * mask_BxT, None


def gigpo(
  inputs: CreditInputs,
  *,
  weight: float = 1.0,
  discount: float = 0.95,
  by_std: bool = True,
  eps: float = 1e-6,
) -> tuple[jax.Array, None]:
  """A_t = A_row + weight·(R_s − mean) / (std + eps), R_s = Σ_{j≥s} discount^{j−s}·r_j, s the turn that t is in.

  r_j is the environment's reward of turn j. Mean and unbiased std are over the turns of the group that start from the
  same state, which is the observation before the turn, compared as exact text. A turn alone in its state gets 0, so
  that with distinct states, or weight = 0, this is GRPO. `by_std` false, with `advantage.fn=group_centered`, is the
  official code's mean_norm. arXiv:2505.10978 (GiGPO; the tests compare with official code).
  """
  step_BxT = _turn_advantage(inputs, present(inputs.state_BxT), discount, eps, by_std)
  return (inputs.advantage_Bx1 + weight * step_BxT) * inputs.mask_BxT, None


@requires('it compares the rewards of turns, not R', advantage=('raw',))
def turn_grouped(
  inputs: CreditInputs, *, discount: float = 0.0, eps: float = 1e-6
) -> tuple[jax.Array, None]:
  """A_t = (R_k − mean) / (std + eps), R_k = Σ_{j≥k} discount^{j−k}·r_j, k the turn that t is in.

  r_j is the environment's reward of turn j. Mean and unbiased std are over the turns number k of the group; a turn
  that no other row has gets 0. Agents that act in a fixed order are thus compared with themselves. As in the official
  code, which has no discount: it counts r_k alone. There all rollouts of a group continue from the best one's turn k;
  here each continues from its own. arXiv:2510.11062 (AT-GRPO).
  """
  mask_BxT, turn_BxT = inputs.mask_BxT, present(inputs.turn_BxT)
  return _turn_advantage(inputs, turn_BxT, discount, eps) * mask_BxT, None


@requires('it subtracts the mean of R over the rows that have a turn', advantage=('raw',))
def turn_whitened(
  inputs: CreditInputs, *, bound: float = 3.0, least: float = 1e-6
) -> tuple[jax.Array, None]:
  """A_t = clip((A_k − mean) / std, ±bound), A_k = A_row − mean_g, t a token of turn k; with `advantage.fn=raw`, of R.

  mean_g is over the rows of the group that have a turn k, and 0 for a single one; mean and unbiased std are over all
  rows that have one. Finished rows are excluded from the statistics. A std of at most `least` does not divide. Both are
  constants of the official code. arXiv:2602.06554 (SeeUPO, batch-level normalization in its code).
  """
  mask_BxT, group_B = inputs.mask_BxT, inputs.group_B
  turn_BxT = present(inputs.turn_BxT)
  has_BxS = (_by_turn(mask_BxT, turn_BxT) > 0).astype(mask_BxT.dtype)
  n_BxS = group_sum(has_BxS, group_B)
  mean_BxS = group_sum(inputs.advantage_Bx1 * has_BxS, group_B) / jnp.maximum(n_BxS, 1)
  own_BxS = (inputs.advantage_Bx1 - jnp.where(n_BxS > 1, mean_BxS, 0.0)) * has_BxS

  def over_rows(x_BxS: jax.Array) -> jax.Array:
    return x_BxS.sum(0, keepdims=True)

  n_1xS = over_rows(has_BxS)
  off_BxS = (own_BxS - over_rows(own_BxS) / jnp.maximum(n_1xS, 1)) * has_BxS
  std_1xS = jnp.sqrt(over_rows(off_BxS**2) / jnp.maximum(n_1xS - 1, 1))
  step_BxS = jnp.clip(off_BxS / jnp.where(std_1xS > least, std_1xS, 1.0), -bound, bound)
  return jnp.take_along_axis(step_BxS, turn_BxT, axis=1) * mask_BxT, None


@requires('it whitens the rewards of turns, not R', advantage=('raw',))
def turn_reward_whitened(inputs: CreditInputs, *, eps: float = 1e-8) -> tuple[jax.Array, None]:
  """A_t = (r_k − mean) / √max(var, eps), r_k the environment's reward of the turn k that t is in.

  Mean and biased variance are over all sampled tokens, of all turns, rows and groups together: REINFORCE++ where every
  turn is a completion of its own, without discount and penalty (arXiv:2501.03262). There is no group by role, so that a
  role that is always paid less has negative advantages; `turn_grouped` compares turns of a number alone.
  arXiv:2510.08529 (CoMAS; the tests compare with official code).
  """
  mask_BxT = inputs.mask_BxT
  last_BxT = _turn_ends(mask_BxT, present(inputs.turn_BxT))
  reward_BxT = _spread(present(inputs.turn_reward_BxT).astype(mask_BxT.dtype), last_BxT)
  n = jnp.maximum(mask_BxT.sum(), 1)
  off_BxT = (reward_BxT - (reward_BxT * mask_BxT).sum() / n) * mask_BxT
  return off_BxT / jnp.sqrt(jnp.maximum((off_BxT**2).sum() / n, eps)), None


@requires('it compares the mean rewards of nodes, not R', advantage=('raw',))
def by_depth(
  inputs: CreditInputs, *, eps: float = 1e-8, least: float = 1e-6
) -> tuple[jax.Array, None]:
  """A_t = (R_n − mean) / (std + eps) / |n|, n the node of token t: the rows of the group with equal tokens up to t.

  R_n is the mean of R over the |n| rows of the node; mean and unbiased std are over the nodes of the group at t, of
  rows that have a token t. A node alone at its depth gets 0, and so do all where std is below `least`. Each of a
  node's rows has 1/|n| of its gradient, as a node counts once in the official code; the denominators of the loss count
  the tokens of all rows. Where no rows share tokens it is GRPO. Left out of that code: rewards weighted by probability,
  pruned depths and widths; its clip at 5 binds from 27 nodes on. Rows of equal length there, and branches that draw
  the same token are one node here. arXiv:2509.06040 (BranchGRPO).
  """
  tokens_BxT = jnp.asarray(present(inputs.tokens_BxT))
  R_B = inputs.advantage_Bx1[:, 0]
  group_BxB = inputs.group_B[:, None] == inputs.group_B[None]

  def total(x_B: jax.Array, among_BxB: jax.Array) -> jax.Array:
    return jnp.where(among_BxB, x_B[None], 0).sum(1)

  def next_token(same_BxB: jax.Array, column: Columns) -> tuple[jax.Array, jax.Array]:
    token_B, mask_B = column
    same_BxB &= token_B[:, None] == token_B[None]
    n_B = jnp.maximum(total(mask_B, same_BxB), 1)
    node_B, R_n_B = mask_B / n_B, total(mask_B * R_B, same_BxB) / n_B  # each node counts 1 in all
    nodes_B = total(node_B, group_BxB)
    off_B = R_n_B - total(node_B * R_n_B, group_BxB) / jnp.maximum(nodes_B, 1)
    std_B = jnp.sqrt(total(node_B * off_B**2, group_BxB) / jnp.maximum(nodes_B - 1, 1))
    return same_BxB, jnp.where(std_B >= least, off_B / (std_B + eps) * node_B, 0.0)

  _, advantage_TxB = jax.lax.scan(next_token, group_BxB, (tokens_BxT.T, inputs.mask_BxT.T))
  return advantage_TxB.T, None


def _ahead(x_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Σ_{j≥t} x_j of each token's row."""
  return row_sum(x_BxT, mask_BxT) - jnp.cumsum(x_BxT, axis=1) + x_BxT


def _by_turn(x_BxT: jax.Array, turn_BxT: jax.Array) -> jax.Array:
  """Sums over the tokens of each turn: [B, T], indexed by turn, as a row has at most T turns."""
  return jax.vmap(lambda x_T, turn_T: jax.ops.segment_sum(x_T, turn_T, num_segments=x_T.shape[0]))(
    x_BxT, turn_BxT
  )


def _turn_advantage(
  inputs: CreditInputs, alike_BxT: jax.Array, discount: float, eps: float, by_std: bool = True
) -> jax.Array:
  """(R − mean) / (std + eps) over the turns of a group with equal `alike`, R the discounted sum from a turn on.

  With `by_std` false it is R − mean.
  """
  mask_BxT = inputs.mask_BxT
  last_BxT = _turn_ends(mask_BxT, present(inputs.turn_BxT))
  return_BxT = _from_behind(
    lambda total, x, last: jnp.where(last > 0, x + discount * total, total),
    (present(inputs.turn_reward_BxT).astype(mask_BxT.dtype), last_BxT),
  )
  off_BxT, std_BxT = _among_alike(return_BxT, alike_BxT, inputs.group_B, last_BxT)
  turn_BxT = off_BxT / (std_BxT + eps if by_std else 1.0)
  return _spread(turn_BxT, last_BxT)


def _spread(x_BxT: jax.Array, last_BxT: jax.Array) -> jax.Array:
  """The value of its turn's last token at every token."""
  return _from_behind(lambda later, x, last: jnp.where(last > 0, x, later), (x_BxT, last_BxT))


def _turn_ends(mask_BxT: jax.Array, turn_BxT: jax.Array) -> jax.Array:
  """1 for the last token of every turn."""

  def after(x_BxT: jax.Array) -> jax.Array:
    return jnp.pad(x_BxT, ((0, 0), (0, 1)))[:, 1:]

  goes_on = (after(mask_BxT) > 0) & (after(turn_BxT) == turn_BxT)
  return mask_BxT * ~goes_on


def _from_behind(f: Callable[..., jax.Array], columns: Columns) -> jax.Array:
  """The carry of f(carry, *column) at every token, from the last token to the first, starting from 0."""

  def back(carry: jax.Array, column: Columns) -> tuple[jax.Array, jax.Array]:
    carry = f(carry, *column)
    return carry, carry

  start = jnp.zeros_like(columns[0][:, 0])
  return jax.lax.scan(back, start, tuple(x.T for x in columns), reverse=True)[1].T


def _among_alike(
  x_BxT: jax.Array, state_BxT: jax.Array, group_B: jax.Array, chosen_BxT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """x − mean and std among the chosen tokens of a group and state; 0 where not chosen."""
  shape, chosen = x_BxT.shape, chosen_BxT.ravel()
  keys = chosen <= 0, jnp.broadcast_to(group_B[:, None], shape).ravel(), state_BxT.ravel()
  order = jnp.lexsort(keys[::-1])  # chosen tokens first, equal groups and states adjacent
  changed = sum((jnp.diff(key[order].astype(jnp.int32)) != 0).astype(jnp.int32) for key in keys)
  sort = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(changed > 0)]).astype(jnp.int32)
  alike = jnp.zeros_like(sort).at[order].set(sort)

  def total(x: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x * chosen, alike, num_segments=x.size)[alike]

  x = x_BxT.ravel()
  n = total(jnp.ones_like(x))
  off = x - total(x) / jnp.maximum(n, 1)
  std = jnp.sqrt(total(off**2) / jnp.maximum(n - 1, 1))
  return jnp.where(chosen > 0, off, 0.0).reshape(shape), std.reshape(shape)


def _whitened(x_BxT: jax.Array, mask_BxT: jax.Array, eps: float = 1e-8) -> jax.Array:
  """(x − mean) / √(var + eps) over all sampled tokens, var unbiased."""
  n = mask_BxT.sum()
  off_BxT = (x_BxT - (x_BxT * mask_BxT).sum() / jnp.maximum(n, 1)) * mask_BxT
  return off_BxT / jnp.sqrt((off_BxT**2).sum() / jnp.maximum(n - 1, 1) + eps)
