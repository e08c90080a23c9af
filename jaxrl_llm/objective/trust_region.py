"""Trust regions as weights: log_ratio_BxT, tokens → (weight_BxT, surrogate_BxT).

`weight` multiplies A·∇log π, c = denominator · W · A. `surrogate` is the value in the paper, for the log alone; where a
paper defines a weight, `clip_masks.detached` returns both. Inputs carry no gradient. `@needs('rows')` marks functions
of a whole minibatch. Every public function may be named in `config.objective.trust_region.fn`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.objective import clip_masks
from jaxrl_llm.objective.token_inputs import (
  Tokens,
  exp,
  group_sum,
  level_within,
  needs,
  present,
  requires,
  row_mean,
  smallest_within,
)


def none(log_ratio_BxT: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
  """W = r, surrogate r·A."""
  ratio = exp(log_ratio_BxT)
  return ratio, ratio * tokens.advantage_BxT


def clip(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, low: float = 0.2, high: float = 0.2
) -> tuple[jax.Array, jax.Array]:
  """min(r·A, clip(r, 1−low, 1+high)·A), so W = r, or 0 where it is clipped.

  W = 0 where (A > 0 and r > 1+high) or (A < 0 and r < 1−low). arXiv:1707.06347 (PPO),
  arXiv:2503.14476 (DAPO: low 0.2, high 0.28).
  """
  return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)


def dual_clip(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.2,
  high: float = 0.2,
  most: float = 3.0,
) -> tuple[jax.Array, jax.Array]:
  """PPO's clip, and max(·, most·A) where A < 0: no gradient there beyond r = most.

  TRL's `delta` is `most`. arXiv:1912.09729 (dual-clip PPO).
  """
  weight, surrogate = clip(log_ratio_BxT, tokens, low=low, high=high)
  return clip_masks.dual(weight, surrogate, exp(log_ratio_BxT), tokens.advantage_BxT, most)


def cap(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, most: float = 5.0
) -> tuple[jax.Array, jax.Array]:
  """W = min(r, most), nothing is dropped: CISPO with the absolute bound of TRL and ScaleRL.

  arXiv:2510.13786 (ScaleRL: 4, 5 and 8 alike).
  """
  return clip_masks.detached(jnp.minimum(exp(log_ratio_BxT), most), tokens)


def cap_above(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, high: float = 4.0
) -> tuple[jax.Array, jax.Array]:
  """W = min(r, 1+high): CISPO with the bound of slime and MiniMax. arXiv:2506.13585 (CISPO)."""
  return clip_masks.detached(jnp.minimum(exp(log_ratio_BxT), 1 + high), tokens)


def cap_band(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, low: float = 0.2, high: float = 0.2
) -> tuple[jax.Array, jax.Array]:
  """W = clip(r, 1−low, 1+high): CISPO with the two bounds of verl.

  A lower bound above 0 keeps gradients on tokens that are already unlikely. arXiv:2506.13585 (CISPO).
  """
  return clip_masks.detached(jnp.clip(exp(log_ratio_BxT), 1 - low, 1 + high), tokens)


def one_side(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.2,
  high: float = 0.2,
  corrected: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """W = K(r)·r, or K(r) alone: K drops the tokens that clip drops. arXiv:2509.24203 (REC-OneSide).

  With `corrected` the gradient is PPO's.
  """
  keep = clip_masks.one_side(exp(log_ratio_BxT), tokens.advantage_BxT, 1 - low, 1 + high)
  return clip_masks.kept(keep, log_ratio_BxT, tokens, corrected)


def two_side(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  low: float = 0.2,
  high: float = 0.2,
  corrected: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """W = 1[1−low ≤ r ≤ 1+high]·r, or without r. arXiv:2509.24203 (REC-TwoSide).

  sPPO with ε is low = ε / (1 + ε) and high = ε, not corrected; Trinity-RFT's ε is 0.3.
  """
  keep = clip_masks.within(exp(log_ratio_BxT), 1 - low, 1 + high)
  return clip_masks.kept(keep, log_ratio_BxT, tokens, corrected)


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

  For the outer tokens the gradient points back toward r = 1. With `corrected` they count r times; the authors' recipe
  does not. arXiv:2509.24203 (REC-Ring).
  """
  ratio, advantage = exp(log_ratio_BxT), tokens.advantage_BxT
  keep = clip_masks.within(ratio, 1 - low, 1 + high)
  keep |= (advantage > 0) & (ratio <= 1 - outer_low)
  keep |= (advantage < 0) & (ratio >= 1 + outer_high)
  return clip_masks.kept(keep, log_ratio_BxT, tokens, corrected)


def total_variation(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, delta: float = 0.2, most: float = 20.0
) -> tuple[jax.Array, jax.Array]:
  """W = min(r, most), 0 where π − π_b > delta and A > 0, or π − π_b < −delta and A < 0.

  A token of small probability is therefore never dropped. `delta` is ours. arXiv:2602.04879 (DPPO).
  """
  gap = jnp.exp(tokens.logp_BxT) - jnp.exp(tokens.behavior_BxT)
  keep = ~clip_masks.beyond(gap > delta, gap < -delta, tokens.advantage_BxT)
  return clip_masks.detached(jnp.where(keep, jnp.minimum(exp(log_ratio_BxT), most), 0.0), tokens)


def binary_kl(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, delta: float = 0.05, most: float = 20.0
) -> tuple[jax.Array, jax.Array]:
  """As total_variation, with KL(Bernoulli(π_b) ‖ Bernoulli(π)) > delta. arXiv:2602.04879 (DPPO).

  `delta` is ours.
  """
  p, q = jnp.exp(tokens.behavior_BxT), jnp.exp(tokens.logp_BxT)
  gap, tiny = q - p, 1e-7
  rest = jnp.log(jnp.maximum(1 - p, tiny)) - jnp.log(jnp.maximum(1 - q, tiny))
  divergence = p * (tokens.behavior_BxT - tokens.logp_BxT) + (1 - p) * rest
  far = divergence > delta
  keep = ~clip_masks.beyond(far & (gap > 0), far & (gap < 0), tokens.advantage_BxT)
  return clip_masks.detached(jnp.where(keep, jnp.minimum(exp(log_ratio_BxT), most), 0.0), tokens)


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
  square, harmful = clip_masks.harmful(log_ratio_BxT, tokens)
  level = level_within(square, harmful, budget)
  floor, roof = 1 - low, 1 + high
  tau, ratio, advantage = jnp.sqrt(level), exp(log_ratio_BxT), tokens.advantage_BxT
  edges = jnp.minimum(jnp.exp(-tau), floor), jnp.maximum(jnp.exp(tau), roof)
  # Compared as squares: comparing e^τ with the ratio it was computed from depends on rounding.
  keep = clip_masks.one_side(ratio, advantage, floor, roof) | (square < level)
  return jnp.where(keep, ratio, 0.0), clip_masks.clip(log_ratio_BxT, advantage, *edges)[1]


@needs('rows')
@requires('its budget is of single tokens', ratio=_TOKENS)
def second_moment_mask(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, budget: float = 0.04
) -> tuple[jax.Array, jax.Array]:
  """W = r, 0 for the harmful tokens of largest (log r)², until the mean of the others is ≤ budget.

  M2PO as in Trinity: no clip, the denominator keeps all tokens. arXiv:2510.01161 (M2PO).
  """
  square, harmful = clip_masks.harmful(log_ratio_BxT, tokens)
  drop = harmful & ~smallest_within(square, harmful, budget)
  ratio = jnp.where(drop, 0.0, exp(log_ratio_BxT))
  return ratio, ratio * tokens.advantage_BxT


_BAPO_LOW = [0.6, 0.65, 0.7, 0.75] + [0.8] * 17
_BAPO_HIGH = [1.2] * 5 + [1.2 + 0.05 * i for i in range(1, 17)]


@needs('rows')
def balanced_clip(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, target: float = 1.0, most: float = 3.0
) -> tuple[jax.Array, jax.Array]:
  """Dual clip with the first bounds for which gains weigh at least `target` times as much as losses: BAPO.

  Bounds on r increase from (0.6, 1.2) in steps of 0.05: the lower one to 0.8, then the upper one to 2. Gains are
  A·min(r, upper) where A > 0, losses A·max(r, lower) where A < 0, summed over the batch. As in the recipe's code; its
  README uses a share of 0.5 instead. arXiv:2510.18927 (BAPO).
  """
  ratio, advantage = exp(log_ratio_BxT), tokens.advantage_BxT

  def enough(low: jax.Array, high: jax.Array) -> jax.Array:
    gain = jnp.where(advantage > 0, advantage * jnp.minimum(ratio, high), 0.0)
    loss = jnp.where(advantage < 0, -advantage * jnp.maximum(ratio, low), 0.0)
    return (gain * tokens.mask_BxT).sum() >= target * (loss * tokens.mask_BxT).sum()

  low, high = jnp.array(_BAPO_LOW), jnp.array(_BAPO_HIGH)
  good = jax.vmap(enough)(low, high)
  index = jnp.where(good.any(), jnp.argmax(good), len(_BAPO_LOW) - 1)
  weight, surrogate = clip_masks.clip(log_ratio_BxT, advantage, low[index], high[index])
  return clip_masks.dual(weight, surrogate, ratio, advantage, most)


def sigmoid(
  log_ratio_BxT: jax.Array,
  tokens: Tokens,
  *,
  temperature: float = 1.0,
  temperature_negative: float = 1.05,
) -> tuple[jax.Array, jax.Array]:
  """f(r) = 4/τ·σ(τ(r − 1)), so W = 4σ(1 − σ)·r: a soft clip. arXiv:2511.20347 (SAPO)."""
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
  """W = w^k·e^{λ(1 − w)}, with w the ratio of whole rows. arXiv:2602.10693 (VESPO).

  (k, λ) are (power, decay) where A ≥ 0; log w is clamped to [log 1e-8, 20], as in TRL.
  """
  up = tokens.advantage_BxT >= 0
  k = jnp.where(up, power, power_negative)
  rate = jnp.where(up, decay, decay_negative)
  log_w = jnp.clip(log_ratio_BxT, math.log(1e-8), 20.0)
  return clip_masks.detached(jnp.exp(rate + k * log_w - rate * jnp.exp(log_w)), tokens)


@requires('success is defined as R > 0', advantage=('raw',))
@requires('its ratio is to the sampler', ratio=('direct_product', 'direct'))
def taper(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, most: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """W = 1 where A > 0, min(r, most) where not: successes are trained as supervised data.

  The paper's r is that of whole rows (`ratio.fn=direct_product`), Trinity's and ROLL's of tokens (`direct`).
  arXiv:2503.14286 (TOPR).
  """
  ratio = exp(log_ratio_BxT)
  return clip_masks.detached(
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

  The confidence is the mean over the last `tail` tokens of the mean of their five largest probabilities, under the
  current policy. The official code uses the policy before the batch, which is the same with one minibatch.
  arXiv:2602.02150 (ECHO).
  """
  length_Bx1 = tokens.mask_BxT.sum(1, keepdims=True)
  place = jnp.cumsum(tokens.mask_BxT, axis=1)
  last = tokens.mask_BxT * (place > length_Bx1 - tail)
  confidence = row_mean(present(tokens.confidence_BxT), last)
  eps = base + gain * jax.nn.sigmoid(slope * (1 - confidence))
  return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - eps, 1 + eps)


@needs('old')
@requires('it bounds the ratio to the sampler', ratio=('direct',))
@requires('its center is the policy before the batch', old_policy=('auto', 'before'))
def shifted_clip(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, low: float = 0.2, high: float = 0.2
) -> tuple[jax.Array, jax.Array]:
  """Clip of v = π/π_b to ρ − low and ρ + high, ρ = π_old/π_b.

  From third-party notes, no official code. arXiv:2507.06892 (ReMix).
  """
  rho = exp(tokens.old_BxT - tokens.behavior_BxT)
  return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, rho - low, rho + high)


@requires('it takes the mean over a row itself', ratio=_TOKENS, aggregation=('sequence_mean',))
def geometric(
  log_ratio_BxT: jax.Array, tokens: Tokens, *, low: float = 0.4, high: float = 0.4
) -> tuple[jax.Array, jax.Array]:
  """s = e^{mean log r'}, log r' clipped at −low or high per token on the harmful side: W = s, or 0 where clipped.

  arXiv:2507.20673 (GMPO).
  """
  advantage = tokens.advantage_BxT
  keep = clip_masks.one_side(log_ratio_BxT, advantage, -low, high)
  clipped = jnp.where(keep, log_ratio_BxT, jnp.clip(log_ratio_BxT, -low, high))
  ratio = exp(row_mean(clipped, tokens.mask_BxT))
  return jnp.where(keep, ratio, 0.0), ratio * advantage


@needs('rows')
@requires(
  'A cancels out of the coefficient and must not be 0',
  between=dict(baseline=(0, 1)),
  advantage=('raw',),
)
@requires('it uses no ratio', ratio=('one',))
@requires(
  'it has its own denominator over rows, zero-variance groups included',
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

  Mean over all prompts; one without a right or a wrong answer adds 0. arXiv:2510.04474 (DRPO).
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
  # Rows / prompts undoes the mean over rows. The coefficient multiplies by A, so the weight divides by it.
  size = group_sum(exists * 1.0, group)
  prompts = jnp.where(exists, 1 / jnp.maximum(size, 1), 0.0).sum()
  pull = jnp.where(both, share * exists.sum() / jnp.maximum(prompts, 1), 0.0)[:, None]
  advantage = tokens.advantage_BxT
  weight = jnp.where(advantage != 0, pull / jnp.where(advantage == 0, 1.0, advantage), 0.0)
  return weight, pull * tokens.logp_BxT
