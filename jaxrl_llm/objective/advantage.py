"""Advantages of rollouts relative to a baseline: reward_PxG, length_PxG → advantage_PxG.

`length_PxG` is the length of a rollout in tokens, 0 for an empty row. Empty rows get 0 and are excluded from all
statistics. Further inputs are parameters by name. @needs('norms'): `leverage_PxG` = log(w·n), w = π/π_b of the whole
row, n the norm of the gradient of its log-probability. @needs('contexts'): `context_PxG`, the strategy in a row's
prompt, −1 for none, or its stage. @needs('parts'): `parts_PxGxK`, the rewards whose sum is R, and their weights
`weight_K`. Every public function may be named in `config.objective.advantage.fn`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import needs, requires
from jaxrl_llm.types import UserError


def group_normalized(
  reward_PxG: jax.Array, length_PxG: jax.Array, *, eps: float = 1e-6
) -> jax.Array:
  """A = (R − mean_g) / (std_g + eps), std unbiased (n − 1). arXiv:2402.03300 (GRPO).

  `eps` is 1e-6 in verl and 1e-4 in TRL.
  """
  centered = group_centered(reward_PxG, length_PxG)
  n_Px1 = _exists(length_PxG).sum(1, keepdims=True)
  std = jnp.sqrt((centered**2).sum(1, keepdims=True) / jnp.maximum(n_Px1 - 1, 1))
  return centered / (std + eps)


def group_centered(reward_PxG: jax.Array, length_PxG: jax.Array) -> jax.Array:
  """A = R − mean_g. arXiv:2503.20783 (Dr.GRPO)."""
  exists = _exists(length_PxG)
  return (reward_PxG - _mean(reward_PxG, exists)) * exists


def leave_one_out(reward_PxG: jax.Array, length_PxG: jax.Array) -> jax.Array:
  """A = R − mean of the others = n/(n − 1) · (R − mean_g). arXiv:2402.14740 (RLOO)."""
  n_Px1 = _exists(length_PxG).sum(1, keepdims=True)
  return group_centered(reward_PxG, length_PxG) * n_Px1 / jnp.maximum(n_Px1 - 1, 1)


def raw(reward_PxG: jax.Array, length_PxG: jax.Array, *, baseline: float = 0.0) -> jax.Array:
  """A = R − baseline: REINFORCE with a constant; R = 1, baseline 0 is supervised learning."""
  return (reward_PxG - baseline) * _exists(length_PxG)


def batch_normalized(
  reward_PxG: jax.Array, length_PxG: jax.Array, *, eps: float = 1e-4
) -> jax.Array:
  """A = (R − mean_g) / (std_batch + eps), std over all rewards, unbiased. arXiv:2508.08221 (LitePPO).

  ScaleRL (arXiv:2510.13786) uses it too; `eps` is TRL's.
  """
  exists = _exists(length_PxG)
  n = exists.sum()
  off = (reward_PxG - (reward_PxG * exists).sum() / jnp.maximum(n, 1)) * exists
  std = jnp.sqrt((off**2).sum() / jnp.maximum(n - 1, 1))
  return group_centered(reward_PxG, length_PxG) / (std + eps)


def mean_relative(reward_PxG: jax.Array, length_PxG: jax.Array) -> jax.Array:
  """A = (R − mean_g) / mean_g; 0 where mean_g is 0. arXiv:2602.02710 (MaxRL).

  For rewards of 0 and 1 and success rate p, the weight of a group grows as 1/p.
  """
  exists = _exists(length_PxG)
  mean = _mean(reward_PxG, exists)
  safe = jnp.where(mean == 0, 1.0, mean)
  return jnp.where(mean == 0, 0.0, (reward_PxG - mean) / safe) * exists


def median_centered(
  reward_PxG: jax.Array, length_PxG: jax.Array, *, eps: float = 1e-3
) -> jax.Array:
  """A = (R − median_g) / (MAD_g + eps) · n / #{A ≠ 0}, MAD = median |R − median_g|.

  The median rollout of an odd group has zero advantage; the others are rescaled by n / (number of nonzero), as in the
  official trainer for GSM8K, whose n − 1 other rows are the denominator; that for MATH does not rescale. Rewards of
  0 and 1 have a MAD of 0 in most groups, and A is then 1/eps: use graded rewards or a larger eps.
  arXiv:2601.22582 (MC-GRPO).
  """
  exists = _exists(length_PxG)
  off = (reward_PxG - _median(reward_PxG, exists)) * exists
  advantage = off / (_median(jnp.abs(off), exists) + eps)
  moved = ((advantage != 0) * exists).sum(1, keepdims=True)
  return advantage * exists.sum(1, keepdims=True) / jnp.maximum(moved, 1)


def token_whitened(reward_PxG: jax.Array, length_PxG: jax.Array, *, eps: float = 1e-8) -> jax.Array:
  """A = (R − mean) / √(var + eps), both over all tokens of the batch. arXiv:2501.03262 (REINFORCE++).

  var unbiased; with no per-token penalty and no discount the return of every token is R.
  """
  weight = jnp.asarray(length_PxG, reward_PxG.dtype)
  n = weight.sum()
  off = reward_PxG - (reward_PxG * weight).sum() / jnp.maximum(n, 1)
  var = (off**2 * weight).sum() / jnp.maximum(n - 1, 1)
  return off / jnp.sqrt(var + eps) * _exists(length_PxG)


def group_whitened(reward_PxG: jax.Array, length_PxG: jax.Array, *, eps: float = 1e-8) -> jax.Array:
  """R − mean_g, then whitened over all tokens of the batch. arXiv:2501.03262 (REINFORCE++ baseline)."""
  return token_whitened(group_centered(reward_PxG, length_PxG), length_PxG, eps=eps)


def shifted(reward_PxG: jax.Array, length_PxG: jax.Array, *, shift: float = -0.1) -> jax.Array:
  """A = R − (mean_g + shift): a lower baseline gives failures less weight. arXiv:2506.20520 (AsymRE)."""
  exists = _exists(length_PxG)
  return (reward_PxG - _mean(reward_PxG, exists) - shift) * exists


def exp_weighted(
  reward_PxG: jax.Array, length_PxG: jax.Array, *, temperature: float = 1.0
) -> jax.Array:
  """A = a·e^{a / temperature}, a = R − mean_g: good rollouts count more. arXiv:2509.24203 (RED-Weight)."""
  centered = group_centered(reward_PxG, length_PxG)
  return centered * jnp.exp(centered / temperature)


def balanced(reward_PxG: jax.Array, length_PxG: jax.Array) -> jax.Array:
  """A = E[kept·(R − mean of the kept rows)]: of the rows below mean_g only as many are kept as are not below it.

  Where there are more, the dropped ones are drawn at random; this is the mean over all draws, in closed form. Dropped
  tokens stay in the denominator, as in the official code. arXiv:2509.24203 (RED-Drop).
  """
  exists = _exists(length_PxG)
  # The mean of equal rewards may be rounded to above them.
  good = exists * (reward_PxG >= _mean(reward_PxG, exists) - 1e-6)
  bad = exists - good
  count = lambda x: x.sum(1, keepdims=True)  # noqa: E731
  total = lambda x: jnp.where(x > 0, reward_PxG, 0.0).sum(1, keepdims=True)  # noqa: E731
  kept = jnp.minimum(count(bad), count(good))
  n = jnp.maximum(count(good) + kept, 1)
  mean = (total(good) + kept * _mean(reward_PxG, bad)) / n
  others = (total(bad) - reward_PxG) / jnp.maximum(count(bad) - 1, 1)
  mean_with_row = (total(good) + reward_PxG + (kept - 1) * others) / n
  share = kept / jnp.maximum(count(bad), 1)
  return jnp.where(good > 0, reward_PxG - mean, share * (reward_PxG - mean_with_row)) * exists


def log_mean_exp(
  reward_PxG: jax.Array, length_PxG: jax.Array, *, temperature: float = 1.0
) -> jax.Array:
  """A = (R − τ·log mean_g e^{R/τ}) / (1 + τ); τ → ∞ is the mean. arXiv:2505.17826 (OPMD)."""
  exists = _exists(length_PxG)
  scaled = jnp.where(exists > 0, reward_PxG / temperature, -jnp.inf)
  top = jnp.max(jnp.where(exists > 0, scaled, 0.0), axis=1, keepdims=True)
  soft = top + jnp.log(jnp.maximum(_mean(jnp.exp(scaled - top), exists), 1e-37))
  return (reward_PxG - temperature * soft) / (1 + temperature) * exists


def amplified(
  reward_PxG: jax.Array,
  length_PxG: jax.Array,
  *,
  right: float = 1.0,
  factor: float = 3.0,
  temperature: float = 1.0,
) -> jax.Array:
  """A = 1 / (1 + τ) where R ≥ `right`, else d / (1 + τ), d = R − mean_g, times `factor` where d ≥ 0.

  OPMD with larger advantages of good rollouts; the only row of a group has d = R. arXiv:2601.03715 (R3L).
  """
  exists = _exists(length_PxG)
  alone_Px1 = exists.sum(1, keepdims=True) < 2
  off = reward_PxG - jnp.where(alone_Px1, 0.0, _mean(reward_PxG, exists))
  advantage = jnp.where(off >= 0, factor * off, off)
  return jnp.where(reward_PxG >= right, 1.0, advantage) * exists / (1 + temperature)


def length_weighted(reward_PxG: jax.Array, length_PxG: jax.Array) -> jax.Array:
  """A = R − Σ|y|·R / Σ|y| over the group: approximately the baseline of least variance.

  arXiv:2505.23585 (OPO).
  """
  weight = jnp.asarray(length_PxG, reward_PxG.dtype)
  baseline = (reward_PxG * weight).sum(1, keepdims=True)
  baseline = baseline / jnp.maximum(weight.sum(1, keepdims=True), 1)
  return (reward_PxG - baseline) * _exists(length_PxG)


@needs('norms')
@requires('its baseline weighs whole rows by Π π/π_b', ratio=('direct_product',))
def least_variance(
  reward_PxG: jax.Array,
  length_PxG: jax.Array,
  leverage_PxG: jax.Array,
  *,
  by_std: bool = True,
  floor: float = 1e-8,
) -> jax.Array:
  """A = (R − b) / std_g, b = Σw²n²R / (Σw²n² + floor) over the group: of least variance for Σ w·(R − b)·∇log π.

  std over n rewards. Where it is at most 1e-8, and with `by_std` false, A = R − b, the paper's formula; the official
  scripts divide. w is uncapped as there, even where the loss caps it. Where all gradients are 0, b is the mean.
  arXiv:2602.17616 (VCPO).
  """
  exists = _exists(length_PxG)
  leverage = jnp.where(exists > 0, leverage_PxG, -jnp.inf)
  top_Px1 = jnp.max(leverage, axis=1, keepdims=True)
  pulls = jnp.isfinite(top_Px1)
  # Relative to the largest, because squares of products of ratios overflow.
  square = jnp.where(pulls, jnp.exp(2 * (leverage - jnp.where(pulls, top_Px1, 0.0))), exists)
  weighed = jnp.where(exists > 0, square * reward_PxG, 0.0).sum(1, keepdims=True)
  floor_Px1 = jnp.where(pulls, floor * jnp.exp(-2 * jnp.where(pulls, top_Px1, 0.0)), 0.0)
  baseline = weighed / jnp.maximum(square.sum(1, keepdims=True) + floor_Px1, 1e-30)
  advantage = jnp.where(exists > 0, reward_PxG - baseline, 0.0)
  if not by_std:
    return advantage
  n_Px1 = jnp.maximum(exists.sum(1, keepdims=True), 1)
  std_Px1 = jnp.sqrt((group_centered(reward_PxG, length_PxG) ** 2).sum(1, keepdims=True) / n_Px1)
  return advantage / jnp.where(std_Px1 > 1e-8, std_Px1, 1.0)


def adora(
  reward_PxG: jax.Array,
  length_PxG: jax.Array,
  *,
  weak: float = 0.1,
  right: float = 0.5,
  long_tokens: int = 4054,
  eps: float = 1e-6,
) -> jax.Array:
  """GRPO's A, times `weak` unless the longest right answer is longer than the mean wrong one, in tokens.

  Right is R > `right`. The mean excludes wrong answers of `long_tokens` or more, which the length cap truncated. A
  group without a right answer gets `weak`; a group with one and without a shorter wrong answer does not.
  arXiv:2602.10019 (ADORA).
  """
  exists = _exists(length_PxG) > 0
  length = jnp.asarray(length_PxG, reward_PxG.dtype)
  good = exists & (reward_PxG > right)
  bad = exists & (reward_PxG <= right) & (length < long_tokens)
  longest = jnp.max(jnp.where(good, length, -jnp.inf), axis=1, keepdims=True)
  mean = jnp.where(bad.any(1, keepdims=True), _mean(length, bad.astype(reward_PxG.dtype)), -jnp.inf)
  weight = jnp.where(longest > mean, 1.0, weak)
  return group_normalized(reward_PxG, length_PxG, eps=eps) * weight


@requires('the mean reward must be the success rate', reward_shaping=('none',))
def equal_treatment(
  reward_PxG: jax.Array, length_PxG: jax.Array, *, most: float = 4.0
) -> jax.Array:
  """A = (R − mean_g) · min(1 / (4p(1 − p)), most) where p < ½, p the group's mean reward: every Σ|A| is that of p = ½.

  The paper samples ⌈n·(1 − 2p)² / (4p(1 − p))⌉ more rollouts of such a prompt. Here the existing rollouts get that
  weight: the same mean with more variance. `most` is the paper's largest number of rollouts over the first, 32 / 8. For
  rewards of 0 and 1. arXiv:2508.13755 (DARS, ET).
  """
  p, a = _rate(reward_PxG, length_PxG), group_centered(reward_PxG, length_PxG)
  return a * _at_most(p, 1 / (4 * p * (1 - p)), most)


@requires('the mean reward must be the success rate', reward_shaping=('none',))
def hardness_weighted(
  reward_PxG: jax.Array, length_PxG: jax.Array, *, most: float = 8.0
) -> jax.Array:
  """A = (R − mean_g) · min(1 / (2p), most) where p < ½: Σ|A| grows as right answers get rarer.

  As `equal_treatment`, for ⌈n·(1 − 2p) / (2p)⌉ more rollouts; `most` is 64 / 8. arXiv:2508.13755 (DARS, HW).
  """
  p, a = _rate(reward_PxG, length_PxG), group_centered(reward_PxG, length_PxG)
  return a * _at_most(p, 1 / (2 * p), most)


@requires('a completion must be right or wrong', reward_shaping=('none',))
def pass_at_k(
  reward_PxG: jax.Array,
  length_PxG: jax.Array,
  *,
  k: int = 4,
  right: float = 0.5,
  eps: float = 1e-6,
) -> jax.Array:
  """A = (1 − ρ) / (σ + eps) where right, (1 − ρ − C(w−1, k−1) / C(n−1, k−1)) / (σ + eps) where wrong.

  The expectation, over all k-subsets of the group, of a subset's normalized pass@k: ρ = 1 − C(w, k) / C(n, k) is its
  mean, w of n rows are wrong, σ = √(ρ(1 − ρ)). Right is R > `right`; other values of R do not matter. A group with
  fewer than k wrong rows has no advantage. k = 1 is GRPO up to the estimate of σ. Raises UserError for a k that no
  group has. arXiv:2508.10751 (Pass@k Training).
  """
  if not 1 <= k <= reward_PxG.shape[1]:
    raise UserError(
      f'config.objective.advantage.k={k} must be from 1 to the {reward_PxG.shape[1]} rollouts of a prompt.'
    )
  exists = _exists(length_PxG)
  good = exists * (reward_PxG > right)
  n_Px1 = exists.sum(1, keepdims=True)
  wrong_Px1 = n_Px1 - good.sum(1, keepdims=True)
  missed_Px1 = _all_among(wrong_Px1, n_Px1, k)
  spread = jnp.sqrt(missed_Px1 * (1 - missed_Px1)) + eps
  own_Px1 = _all_among(wrong_Px1 - 1, n_Px1 - 1, k - 1)
  return jnp.where(good > 0, missed_Px1, missed_Px1 - own_Px1) / spread * exists


def best_margin(reward_PxG: jax.Array, length_PxG: jax.Array, *, eps: float = 1e-6) -> jax.Array:
  """A = (R − second largest R) / (std_g + eps) for the best row of the group, 0 for all others.

  std unbiased; rows that share the largest reward get 0. arXiv:2503.19595.
  """
  exists = _exists(length_PxG)
  known = jnp.where(exists > 0, reward_PxG, -jnp.inf)
  largest_Px2 = jax.lax.top_k(known, min(2, known.shape[1]))[0]
  best_Px1, second_Px1 = largest_Px2[:, :1], largest_Px2[:, -1:]
  margin_Px1 = jnp.where(jnp.isfinite(second_Px1), best_Px1 - second_Px1, 0.0)
  n_Px1 = exists.sum(1, keepdims=True)
  centered = group_centered(reward_PxG, length_PxG)
  std = jnp.sqrt((centered**2).sum(1, keepdims=True) / jnp.maximum(n_Px1 - 1, 1))
  return jnp.where(known == best_Px1, margin_Px1, 0.0) / (std + eps) * exists


def rescaled(reward_PxG: jax.Array, length_PxG: jax.Array, *, scale: float = 1.0) -> jax.Array:
  """A = (n / #{R ≠ 0})·(R − mean_g) / scale, n and the count over all rows of the minibatch.

  Fewer rewards other than 0 give larger advantages. As in verl's code. arXiv:2504.02546 (GPG).
  """
  exists = _exists(length_PxG)
  scored = (exists * (reward_PxG != 0)).sum()
  gain = exists.sum() / jnp.maximum(scored, 1) / scale
  return gain * group_centered(reward_PxG, length_PxG)


@needs('greedy')
def greedy_baseline(reward_PxG: jax.Array, length_PxG: jax.Array) -> jax.Array:
  """A = R − R of the group's first row, which is sampled greedily and not learned. arXiv:2310.10505 (ReMax).

  0 for a group without its first row.
  """
  exists = _exists(length_PxG)
  return (reward_PxG - reward_PxG[:, :1]) * exists * exists[:, :1]


@needs('parts')
@requires(
  'it reads each reward alone, and shaping changes the sum of the rewards',
  reward_shaping=('none',),
)
def decoupled(
  reward_PxG: jax.Array,
  length_PxG: jax.Array,
  parts_PxGxK: jax.Array,
  weight_K: jax.Array,
  *,
  eps: float = 1e-4,
) -> jax.Array:
  """A = z_batch(Σ_k w_k·z_group(R_k)), z(x) = (x − mean) / (std + eps), std unbiased; R itself is not used.

  For several rewards on different scales: equal sums may have different advantages. With one part this is GRPO up to a
  constant. As in the code of TRL and verl. arXiv:2601.05242 (GDPO).
  """
  del reward_PxG
  part = jax.vmap(lambda x: group_normalized(x, length_PxG, eps=eps), in_axes=2, out_axes=2)
  total_PxG = part(parts_PxGxK) @ weight_K
  # The mean is 0 in every group, and therefore in the batch; empty rows are 0.
  n = _exists(length_PxG).sum()
  return total_PxG / (jnp.sqrt((total_PxG**2).sum() / jnp.maximum(n - 1, 1)) + eps)


@needs('contexts')
def nudged(
  reward_PxG: jax.Array,
  length_PxG: jax.Array,
  context_PxG: jax.Array,
  *,
  between: float = 1.1,
  eps: float = 1e-6,
) -> jax.Array:
  """A = z_group((R − mean_c) + between·(mean_c − mean_g)), mean_c over the group's rows of the same context.

  Rows without a context have R − mean_g before z_group. between = 1 is GRPO. The official std is over n.
  arXiv:2605.15726 (NudgeRL).
  """
  exists = _exists(length_PxG)
  reward = jnp.where(exists > 0, reward_PxG, 0.0)
  alike = (context_PxG[:, :, None] == context_PxG[:, None]) * exists[:, None]
  own = (alike * reward[:, None]).sum(2) / jnp.maximum(alike.sum(2), 1)
  mean = _mean(reward_PxG, exists)
  apart = (reward - own) + between * (own - mean)
  centered = jnp.where(context_PxG >= 0, apart, reward - mean)
  return group_normalized(centered, length_PxG, eps=eps)


@needs('contexts')
def staged(
  reward_PxG: jax.Array,
  length_PxG: jax.Array,
  context_PxG: jax.Array,
  *,
  value: str = 'mean',
  alpha: float = 1.0,
) -> jax.Array:
  """A = a − mean_g(a), a = R − alpha·V, V of a row's stage from the group's rows that begin with its prefix.

  These are the rows of its stage and of later ones, whose prefixes extend its own. V is their mean reward, or their
  largest (`most`: any success) or smallest (`least`: no failure). Raises UserError for another `value`. The paper's
  projection onto orders of advantages is left out. `alpha` is ours.
  arXiv:2509.09284 (Tree-OPO, reconstructed from summaries: expectation, optimistic, pessimistic).
  """
  if value not in ('mean', 'most', 'least'):
    raise UserError(
      f'config.objective.advantage.value={value!r} is unknown; choose one of: mean, most, least.'
    )
  exists = _exists(length_PxG)
  reward = jnp.where(exists > 0, reward_PxG, 0.0)
  begins = (context_PxG[:, None] >= context_PxG[:, :, None]) & (exists[:, None] > 0)
  if value == 'mean':
    V = (begins * reward[:, None]).sum(2) / jnp.maximum(begins.sum(2), 1)
  elif value == 'most':
    V = jnp.where(begins, reward[:, None], -jnp.inf).max(2)
  else:
    V = jnp.where(begins, reward[:, None], jnp.inf).min(2)
  apart = jnp.where(exists > 0, reward - alpha * V, 0.0)
  return group_centered(apart, length_PxG)


def _rate(reward_PxG: jax.Array, length_PxG: jax.Array) -> jax.Array:
  # The weight of an all-wrong group must be finite, although its advantage is 0.
  return jnp.clip(_mean(reward_PxG, _exists(length_PxG)), 1e-6, 1 - 1e-6)


def _at_most(p_Px1: jax.Array, weight_Px1: jax.Array, most: float) -> jax.Array:
  return jnp.where(p_Px1 < 0.5, jnp.minimum(weight_Px1, most), 1.0)


def _all_among(count_Px1: jax.Array, n_Px1: jax.Array, k: int) -> jax.Array:
  """C(count, k) / C(n, k): the probability that k of n rows, drawn without replacement, are all of `count`."""
  drawn_1xk = jnp.arange(k, dtype=count_Px1.dtype)[None]
  left_Pxk = jnp.maximum(count_Px1 - drawn_1xk, 0)
  return (left_Pxk / jnp.maximum(n_Px1 - drawn_1xk, 1)).prod(1, keepdims=True)


def _exists(length_PxG: jax.Array) -> jax.Array:
  return (jnp.asarray(length_PxG) > 0).astype(jnp.result_type(float))


def _mean(x_PxG: jax.Array, exists_PxG: jax.Array) -> jax.Array:
  total = jnp.where(exists_PxG > 0, x_PxG * exists_PxG, 0.0).sum(1, keepdims=True)
  return total / jnp.maximum(exists_PxG.sum(1, keepdims=True), 1)


def _median(x_PxG: jax.Array, exists_PxG: jax.Array) -> jax.Array:
  """The median over existing rows, as empty rows sort to the end."""
  n_Px1 = exists_PxG.sum(1, keepdims=True).astype(int)
  ordered = jnp.sort(jnp.where(exists_PxG > 0, x_PxG, jnp.inf), axis=1)
  low = jnp.take_along_axis(ordered, jnp.maximum(n_Px1 - 1, 0) // 2, axis=1)
  high = jnp.take_along_axis(ordered, jnp.maximum(n_Px1, 1) // 2, axis=1)
  high = jnp.where(jnp.isfinite(high), high, low)
  return jnp.where(n_Px1 > 0, (low + high) / 2, 0.0)
