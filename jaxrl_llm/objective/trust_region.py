"""Trust regions as weights: log_ratio_BxT, tokens → (weight_BxT, surrogate_BxT).

`weight` is what multiplies A·∇log π, c = denominator · W · A; `surrogate` is the value that the paper writes, for the
log alone; where a paper writes a weight, `_detached` gives both. Every public function may be named in
`config.objective.trust_region.fn`. Inputs carry no gradient. `@needs('rows')` marks what looks at a whole minibatch.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.objective import ratio_bounds
from jaxrl_llm.objective.token_inputs import (
  Tokens,
  exp,
  group_sum,
  level_within,
  needs,
  requires,
  row_mean,
  smallest_within,
)


def none(log_ratio_BxT: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
  """W = r, surrogate r·A. Source: none."""
  ratio = exp(log_ratio_BxT)
  return ratio, ratio * tokens.advantage_BxT


def clip(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, low: float = 0.2, high: float = 0.2
) -> tuple[jax.Array, jax.Array]:
  """min(r·A, clip(r, 1−low, 1+high)·A), so W = r where it moves, 0 where it is clipped.

  W = 0 where (A > 0 and r > 1+high) or (A < 0 and r < 1−low). Source: arXiv:1707.06347 (PPO),
  arXiv:2503.14476 (DAPO: low 0.2, high 0.28).
  """
  return ratio_bounds.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)


def dual_clip(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.2,
  high: float = 0.2,
  most: float = 3.0,
) -> tuple[jax.Array, jax.Array]:
  """PPO's clip, and max(·, most·A) where A < 0: no gradient there beyond r = most.

  TRL's `delta` is `most`. Source: arXiv:1912.09729 (dual-clip PPO).
  """
  weight, surrogate = clip(log_ratio_BxT, tokens, low=low, high=high)
  return ratio_bounds.dual(weight, surrogate, exp(log_ratio_BxT), tokens.advantage_BxT, most)


def cap(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, most: float = 5.0
) -> tuple[jax.Array, jax.Array]:
  """W = min(r, most), nothing is dropped: CISPO as TRL and ScaleRL count, an absolute bound.

  Source: arXiv:2510.13786 (ScaleRL: 4, 5 and 8 alike).
  """
  return ratio_bounds.detached(jnp.minimum(exp(log_ratio_BxT), most), tokens)


def cap_above(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, high: float = 4.0
) -> tuple[jax.Array, jax.Array]:
  """W = min(r, 1+high): CISPO as slime and MiniMax count, no lower bound. Source: arXiv:2506.13585 (CISPO)."""
  return ratio_bounds.detached(jnp.minimum(exp(log_ratio_BxT), 1 + high), tokens)


def cap_band(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, low: float = 0.2, high: float = 0.2
) -> tuple[jax.Array, jax.Array]:
  """W = clip(r, 1−low, 1+high): CISPO as verl counts, bounds on both sides.

  A lower bound above 0 keeps pushing tokens that are already unlikely. Source: arXiv:2506.13585 (CISPO).
  """
  return ratio_bounds.detached(jnp.clip(exp(log_ratio_BxT), 1 - low, 1 + high), tokens)


def one_side(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.2,
  high: float = 0.2,
  corrected: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """W = K(r)·r, or K(r) alone: K drops what clip drops. Source: arXiv:2509.24203 (REC-OneSide).

  With `corrected` the gradient is PPO's.
  """
  keep = ratio_bounds.one_side(exp(log_ratio_BxT), tokens.advantage_BxT, 1 - low, 1 + high)
  return ratio_bounds.kept(keep, log_ratio_BxT, tokens, corrected)


def two_side(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.2,
  high: float = 0.2,
  corrected: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """W = 1[1−low ≤ r ≤ 1+high]·r, or without r. Source: arXiv:2509.24203 (REC-TwoSide).

  sPPO with ε is low = ε / (1 + ε) and high = ε, not corrected; Trinity-RFT's ε is 0.3.
  """
  keep = ratio_bounds.within(exp(log_ratio_BxT), 1 - low, 1 + high)
  return ratio_bounds.kept(keep, log_ratio_BxT, tokens, corrected)


def ring(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.2,
  high: float = 0.2,
  outer_low: float = 0.6,
  outer_high: float = 2.0,
  corrected: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """W = 1 in the band of `two_side`, where A > 0 and r ≤ 1−outer_low, and where A < 0 and r ≥ 1+outer_high; else 0.

  The outer tokens are those that the gradient brings back towards r = 1. With `corrected` they count r times; the
  authors' recipe does not. Source: arXiv:2509.24203 (REC-Ring).
  """
  ratio, advantage = exp(log_ratio_BxT), tokens.advantage_BxT
  keep = ratio_bounds.within(ratio, 1 - low, 1 + high)
  keep |= (advantage > 0) & (ratio <= 1 - outer_low)
  keep |= (advantage < 0) & (ratio >= 1 + outer_high)
  return ratio_bounds.kept(keep, log_ratio_BxT, tokens, corrected)


def total_variation(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, delta: float = 0.2, most: float = 20.0
) -> tuple[jax.Array, jax.Array]:
  """W = min(r, most), 0 where π − π_b > delta and A > 0, or π − π_b < −delta and A < 0.

  So a token of small probability is never dropped. `delta` is ours. Source: arXiv:2602.04879 (DPPO).
  """
  gap = jnp.exp(tokens.logp_BxT) - jnp.exp(tokens.behavior_BxT)
  keep = ~ratio_bounds.beyond(gap > delta, gap < -delta, tokens.advantage_BxT)
  return ratio_bounds.detached(jnp.where(keep, jnp.minimum(exp(log_ratio_BxT), most), 0.0), tokens)


def binary_kl(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, delta: float = 0.05, most: float = 20.0
) -> tuple[jax.Array, jax.Array]:
  """As total_variation, with KL(Bernoulli(π_b) ‖ Bernoulli(π)) > delta. Source: arXiv:2602.04879 (DPPO).

  `delta` is ours.
  """
  p, q = jnp.exp(tokens.behavior_BxT), jnp.exp(tokens.logp_BxT)
  gap, tiny = q - p, 1e-7
  rest = jnp.log(jnp.maximum(1 - p, tiny)) - jnp.log(jnp.maximum(1 - q, tiny))
  divergence = p * (tokens.behavior_BxT - tokens.logp_BxT) + (1 - p) * rest
  far = divergence > delta
  keep = ~ratio_bounds.beyond(far & (gap > 0), far & (gap < 0), tokens.advantage_BxT)
  return ratio_bounds.detached(jnp.where(keep, jnp.minimum(exp(log_ratio_BxT), most), 0.0), tokens)


_TOKENS = ('token', 'direct')  # ratios of single tokens


@needs('rows')
@requires('its budget is of single tokens', ratio=_TOKENS)
def second_moment_clip(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  budget: float = 0.04,
  low: float = 0.3,
  high: float = 0.5,
) -> tuple[jax.Array, jax.Array]:
  """clip at e^{±τ}, never tighter than 1−low and 1+high; τ² the largest of (log r)² with Σ_H min(·, τ²) < budget·|H|.

  H: A > 0 and r > 1, or A < 0 and r < 1. As in the official code the token of τ itself is clipped.
  arXiv:2510.01161 (M2PO).
  """
  square, harmful = ratio_bounds.harmful(log_ratio_BxT, tokens)
  level = level_within(square, harmful, budget)
  floor, roof = 1 - low, 1 + high
  tau, ratio, advantage = jnp.sqrt(level), exp(log_ratio_BxT), tokens.advantage_BxT
  edges = jnp.minimum(jnp.exp(-tau), floor), jnp.maximum(jnp.exp(tau), roof)
  # On squares: whether e^τ is above the ratio that it was made of is a matter of rounding.
  keep = ratio_bounds.one_side(ratio, advantage, floor, roof) | (square < level)
  return jnp.where(keep, ratio, 0.0), ratio_bounds.clip(log_ratio_BxT, advantage, *edges)[1]


@needs('rows')
@requires('its budget is of single tokens', ratio=_TOKENS)
def second_moment_mask(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, budget: float = 0.04
) -> tuple[jax.Array, jax.Array]:
  """W = r, 0 for the harmful tokens of largest (log r)², until the mean of the others is ≤ budget.

  M2PO as Trinity does it: no clip, the denominator keeps all tokens. Source: arXiv:2510.01161 (M2PO).
  """
  square, harmful = ratio_bounds.harmful(log_ratio_BxT, tokens)
  drop = harmful & ~smallest_within(square, harmful, budget)
  ratio = jnp.where(drop, 0.0, exp(log_ratio_BxT))
  return ratio, ratio * tokens.advantage_BxT


_BAPO_LOW = [0.6, 0.65, 0.7, 0.75] + [0.8] * 17
_BAPO_HIGH = [1.2] * 5 + [1.2 + 0.05 * i for i in range(1, 17)]


@needs('rows')
def balanced_clip(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, target: float = 1.0, most: float = 3.0
) -> tuple[jax.Array, jax.Array]:
  """Dual clip with the first bounds that give gains at least `target` times the weight of losses: BAPO.

  Bounds on r go from (0.6, 1.2) up: the lower one to 0.8, then the upper one to 2, in steps of 0.05.
  Gains are A·min(r, upper) where A > 0, losses A·max(r, lower) where A < 0, summed over the batch. As
  the recipe's code; its README counts a share of 0.5 instead. Source: arXiv:2510.18927 (BAPO).
  """
  ratio, advantage = exp(log_ratio_BxT), tokens.advantage_BxT

  def enough(low, high):
    gain = jnp.where(advantage > 0, advantage * jnp.minimum(ratio, high), 0.0)
    loss = jnp.where(advantage < 0, -advantage * jnp.maximum(ratio, low), 0.0)
    return (gain * tokens.mask_BxT).sum() >= target * (loss * tokens.mask_BxT).sum()

  low, high = jnp.array(_BAPO_LOW), jnp.array(_BAPO_HIGH)
  good = jax.vmap(enough)(low, high)
  index = jnp.where(good.any(), jnp.argmax(good), len(_BAPO_LOW) - 1)
  weight, surrogate = ratio_bounds.clip(log_ratio_BxT, advantage, low[index], high[index])
  return ratio_bounds.dual(weight, surrogate, ratio, advantage, most)


def sigmoid(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  temperature: float = 1.0,
  temperature_negative: float = 1.05,
) -> tuple[jax.Array, jax.Array]:
  """f(r) = 4/τ·σ(τ(r − 1)), so W = 4σ(1 − σ)·r: a soft clip. Source: arXiv:2511.20347 (SAPO)."""
  ratio, advantage = exp(log_ratio_BxT), tokens.advantage_BxT
  tau = jnp.where(advantage > 0, temperature, temperature_negative)
  gate = jax.nn.sigmoid(tau * (ratio - 1))
  return 4 * gate * (1 - gate) * ratio, 4 / tau * gate * advantage


@requires('w is the ratio of whole rows', ratio=('product', 'direct_product'))
def gamma(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  power: float = 2.0,
  decay: float = 3.0,
  power_negative: float = 3.0,
  decay_negative: float = 2.0,
) -> tuple[jax.Array, jax.Array]:
  """W = w^k·e^{λ(1 − w)}, with w the ratio of whole rows. Source: arXiv:2602.10693 (VESPO).

  (k, λ) are (power, decay) where A ≥ 0; log w is held within log 1e-8 and 20, as TRL does.
  """
  up = tokens.advantage_BxT >= 0
  k = jnp.where(up, power, power_negative)
  rate = jnp.where(up, decay, decay_negative)
  log_w = jnp.clip(log_ratio_BxT, math.log(1e-8), 20.0)
  return ratio_bounds.detached(jnp.exp(rate + k * log_w - rate * jnp.exp(log_w)), tokens)


@requires('what counts as success is R > 0 itself', advantage=('raw',))
@requires('its ratio is to what sampled', ratio=('direct_product', 'direct'))
def taper(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, most: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """W = 1 where A > 0, min(r, most) where not: successes are learned as if supervised.

  The paper's r is that of whole rows (`ratio.fn=direct_product`), Trinity's and ROLL's of tokens (`direct`).
  Source: arXiv:2503.14286 (TOPR).
  """
  ratio = exp(log_ratio_BxT)
  return ratio_bounds.detached(
    jnp.where(tokens.advantage_BxT > 0, 1.0, jnp.minimum(ratio, most)), tokens
  )


@needs('confidence')
def confidence_clip(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  base: float = 0.05,
  gain: float = 0.15,
  slope: float = 4.0,
  tail: int = 16,
) -> tuple[jax.Array, jax.Array]:
  """PPO's clip with ε = base + gain·σ(slope·(1 − confidence)) for each row.

  The confidence is the mean over the last `tail` tokens of their five largest probabilities' mean, of the policy now;
  the official code's is that of the policy before the batch, the same with one minibatch.
  Source: arXiv:2602.02150 (ECHO).
  """
  length_Bx1 = tokens.mask_BxT.sum(1, keepdims=True)
  place = jnp.cumsum(tokens.mask_BxT, axis=1)
  last = tokens.mask_BxT * (place > length_Bx1 - tail)
  confidence = row_mean(tokens.confidence_BxT, last)
  eps = base + gain * jax.nn.sigmoid(slope * (1 - confidence))
  return ratio_bounds.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - eps, 1 + eps)


@needs('old')
@requires('it bounds the ratio to what sampled', ratio=('direct',))
@requires('its center is the policy before the batch', old_policy=('auto', 'before'))
def shifted_clip(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, low: float = 0.2, high: float = 0.2
) -> tuple[jax.Array, jax.Array]:
  """Clip of v = π/π_b to ρ − low and ρ + high, ρ = π_old/π_b.

  From third-party notes, no official code. Source: arXiv:2507.06892 (ReMix).
  """
  rho = exp(tokens.old_BxT - tokens.behavior_BxT)
  return ratio_bounds.clip(log_ratio_BxT, tokens.advantage_BxT, rho - low, rho + high)


@requires('it takes the mean over a row itself', ratio=_TOKENS, aggregation=('sequence_mean',))
def geometric(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, low: float = 0.4, high: float = 0.4
) -> tuple[jax.Array, jax.Array]:
  """s = e^{mean log r'}, log r' clipped at −low or high per token on the harmful side: W = s where it moves.

  Source: arXiv:2507.20673 (GMPO).
  """
  advantage = tokens.advantage_BxT
  keep = ratio_bounds.one_side(log_ratio_BxT, advantage, -low, high)
  held = jnp.where(keep, log_ratio_BxT, jnp.clip(log_ratio_BxT, -low, high))
  ratio = exp(row_mean(held, tokens.mask_BxT))
  return jnp.where(keep, ratio, 0.0), ratio * advantage


@needs('rows')
@requires(
  'A is divided out again and must not be 0', between=dict(baseline=(0, 1)), advantage=('raw',)
)
@requires('it looks at no ratio', ratio=('one',))
@requires(
  'rows are counted anew, all-equal groups too',
  aggregation=('sequence_mean',),
  zero_variance=('keep',),
)
def listwise(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  max_tokens: int,
  temperature: float = 10.0,
  length_rate: float = 0.1,
) -> tuple[jax.Array, jax.Array]:
  """Per prompt Σ_right ω·s/Σω − τ·log mean_wrong e^{s/τ}, s = mean log π, ω = e^{(1 − |y|/max)/rate}.

  Over all prompts; one without a right or a wrong answer adds nothing. Source: arXiv:2510.04474 (DRPO).
  """
  del log_ratio_BxT
  score = row_mean(tokens.logp_BxT, tokens.mask_BxT)[:, 0]
  length = tokens.mask_BxT.sum(1)
  exists, group = length > 0, tokens.group_B
  right, wrong = exists & (tokens.correct_B > 0.5), exists & (tokens.correct_B <= 0.5)
  omega = jnp.where(right, jnp.exp((1 - length / max_tokens) / length_rate), 0.0)
  soft = jnp.where(wrong, jnp.exp((score - jnp.max(score)) / temperature), 0.0)
  share = omega / jnp.maximum(group_sum(omega, group), 1e-30)
  share -= soft / jnp.maximum(group_sum(soft, group), 1e-30)
  both = (group_sum(right * 1.0, group) > 0) & (group_sum(wrong * 1.0, group) > 0)
  # Rows over prompts undoes the mean over rows; A goes in by the general rule and out again here.
  size = group_sum(exists * 1.0, group)
  prompts = jnp.where(exists, 1 / jnp.maximum(size, 1), 0.0).sum()
  pull = jnp.where(both, share * exists.sum() / jnp.maximum(prompts, 1), 0.0)[:, None]
  advantage = tokens.advantage_BxT
  weight = jnp.where(advantage != 0, pull / jnp.where(advantage == 0, 1.0, advantage), 0.0)
  return weight, pull * tokens.logp_BxT
