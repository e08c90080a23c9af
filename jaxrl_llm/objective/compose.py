"""From rewards to one coefficient per token: every method here has the gradient of −Σ sg(c)·log π."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config import pick
from jaxrl_llm.objective import (
  advantage,
  aggregate,
  correction,
  emphasis,
  kl,
  lr_scale,
  proximal,
  ratio,
  shape,
  trust,
)
from jaxrl_llm.objective.tokens import Tokens
from jaxrl_llm.types import Batch, UserError


class Method(NamedTuple):
  """A method is a choice of ten small functions and two switches."""

  shape: Callable
  advantage: Callable
  correction: Callable
  proximal: Callable
  ratio: Callable
  trust: Callable
  emphasis: Callable
  aggregate: Callable
  kl: Callable
  lr_scale: Callable
  mask_zero_variance: bool  # all-equal groups: out of the mask and out of every denominator
  weigh_rows: bool  # rows kept by chance count 1 / their probability; denominators count them once

  @property
  def needs(self) -> frozenset[str]:
    """What the chosen functions cannot do without; see `tokens.needs`."""
    others = (fn for fn in self if callable(fn) and fn is not self.proximal)
    asked = frozenset().union(*(getattr(fn.func, 'needs', ()) for fn in others))
    if (
      self.proximal.func is not proximal.auto
    ):  # which says itself whose log-probs are the old ones
      asked -= {'old'}
    return asked | getattr(self.proximal.func, 'needs', frozenset())

  @property
  def needs_old(self) -> bool:
    """Log-probs of the weights before the first minibatch, over the whole batch; or of averaged ones."""
    return 'old' in self.needs

  @property
  def needs_average(self) -> bool:
    """An average of the weights over the optimizer's steps: whose log-probs the old ones are."""
    return 'average' in self.needs

  @property
  def needs_versions(self) -> bool:
    """How many optimizer steps ago each token was sampled."""
    return 'versions' in self.needs

  @property
  def needs_norms(self) -> bool:
    """How hard each row pulls at the weights: a pass with a gradient, row by row."""
    return 'norms' in self.needs

  @property
  def needs_rows(self) -> bool:
    """Coefficients depend on all rows of a minibatch: they are worked out before its gradient."""
    return 'rows' in self.needs

  @property
  def needs_reference(self) -> bool:
    """Log-probs of a frozen policy."""
    return 'reference' in self.needs

  @property
  def needs_prepass(self) -> bool:
    """A forward pass without gradient, before that with one."""
    return self.needs_old or self.needs_rows


class Targets(NamedTuple):
  """What a batch asks of the policy, before the policy is looked at. Every array leads with B."""

  mask_BxT: jax.Array  # float32, tokens that count
  advantage_BxT: jax.Array
  weight_BxT: jax.Array  # 1 / denominator where the mask is 1
  behaviour_BxT: jax.Array  # log-probabilities recorded at sampling
  correct_B: jax.Array
  group_B: jax.Array  # int32
  old_BxT: jax.Array | None = None  # None: the behaviour's
  reference_BxT: jax.Array | None = None  # None: no reference policy
  c_BxT: jax.Array | None = None  # None: not worked out yet
  age_BxT: jax.Array | None = (
    None  # int32, optimizer steps since a token was sampled; None: nobody asks
  )
  moved_BxT: jax.Array | None = None  # int32, of them, those taken on this batch


def method(config: Any) -> Method:
  """Reads `config.objective`. Raises UserError for a name or keyword that does not exist, and for a ratio
  and a correction that would both count the sampler's mismatch. Source: none."""
  policy = config.zero_variance['fn']
  if policy not in ('keep', 'mask'):
    raise UserError(
      f'config.objective.zero_variance.fn={policy!r} is unknown; choose one of: keep, mask.'
    )
  weighs = config.correction['fn'] not in ('none', 'divergent_negatives', 'second_moment_mask')
  if config.ratio['fn'].startswith('direct') and weighs:
    raise UserError(
      f'config.objective.correction.fn={config.correction["fn"]!r} counts the mismatch with the sampler, '
      f'and config.objective.ratio.fn={config.ratio["fn"]!r} counts it again; set one of them to none or token.'
    )
  _check_proximal(config)
  return Method(
    shape=pick(shape, config.shape, 'objective.shape'),
    advantage=pick(advantage, config.advantage, 'objective.advantage'),
    correction=pick(correction, config.correction, 'objective.correction'),
    proximal=pick(proximal, config.proximal, 'objective.proximal'),
    ratio=pick(ratio, config.ratio, 'objective.ratio'),
    trust=pick(trust, config.trust, 'objective.trust'),
    emphasis=pick(emphasis, config.emphasis, 'objective.emphasis'),
    aggregate=pick(aggregate, config.aggregate, 'objective.aggregate'),
    kl=pick(kl, config.kl, 'objective.kl'),
    lr_scale=pick(lr_scale, config.lr_scale, 'objective.lr_scale'),
    mask_zero_variance=policy == 'mask',
    weigh_rows=config.weigh_rows,
  )


def _check_proximal(config: Any) -> None:
  chosen = config.proximal['fn']
  corrects = 'old' in getattr(getattr(correction, config.correction['fn'], None), 'needs', ())
  if chosen == 'recorded' and corrects:
    raise UserError(
      f"config.objective.proximal.fn='recorded' leaves config.objective.correction.fn={config.correction['fn']!r} "
      'nothing to correct; set one of them to auto or none.'
    )
  decay = config.proximal.get('decay', 0.0)
  if chosen == 'average' and not 0 <= decay < 1:
    raise UserError(
      f'config.objective.proximal.decay={decay!r} must be from 0 to 1, 1 not included.'
    )


def targets(
  method: Method, batch: Batch, rollouts: int, leverage_B: jax.Array | None = None
) -> Targets:
  """Advantages and denominators, from the whole batch at once. Source: by the functions chosen.

  Which groups are all-equal is judged by `correct_B`, before length shaping: a shaped reward always
  differs a little. The denominator counts what is left after masking them. A row's weight (1 / the
  probability that it was kept) multiplies its coefficients, and no denominator. `leverage_B` is for a method that
  `needs_norms`.
  """
  length_B = batch.rollout.length_B
  B, T = batch.rollout.tokens_BxT.shape
  dtype = jnp.result_type(batch.reward_B)
  mask_BxT = (jnp.arange(T)[None] < length_B[:, None]).astype(dtype)
  reward_B = method.shape(batch.reward_B, length_B, T)
  more = (leverage_B.reshape(-1, rollouts),) if method.needs_norms else ()
  advantage_PxG = method.advantage(
    reward_B.reshape(-1, rollouts), length_B.astype(dtype).reshape(-1, rollouts), *more
  )
  if method.mask_zero_variance:
    mixed_P = mixed(batch.correct_B, length_B, rollouts)
    mask_BxT = mask_BxT * jnp.repeat(mixed_P, rollouts)[:, None]
  weight_BxT = method.aggregate(mask_BxT, T, rollouts)
  if method.weigh_rows:
    weight_BxT *= batch.rollout.weight_B[:, None]
  return Targets(
    mask_BxT=mask_BxT,
    advantage_BxT=advantage_PxG.reshape(-1, 1) * mask_BxT,
    weight_BxT=weight_BxT,
    behaviour_BxT=batch.rollout.logp_BxT,
    correct_B=batch.correct_B,
    group_B=jnp.arange(B, dtype=jnp.int32) // rollouts,
  )


def mixed(correct_B: jax.Array, length_B: jax.Array, rollouts: int) -> jax.Array:
  """1 for a group with both right and wrong answers, else 0: [P]. Source: arXiv:2503.14476 (DAPO)."""
  exists = (length_B > 0).reshape(-1, rollouts)
  correct = correct_B.reshape(-1, rollouts) > 0.5
  return ((correct & exists).any(1) & (~correct & exists).any(1)).astype(jnp.float32)


SUMS = ('pg_loss', 'clipped', 'rejected', 'kl', 'kl_loss')  # what `coefficients` adds up


def coefficients(
  method: Method, target: Targets, logp_BxT: jax.Array, entropy_BxT: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """c = denominator · (correction · emphasis · W(r, A) · A + kl), detached; and sums for the log.

  The loss is −Σ c·log π. `logp_BxT` may be −inf or anything where the mask is 0. The sums are to be added
  over slices of rows; a method that `needs_rows` takes all of a minibatch at once. Source: by the functions
  chosen.
  """
  tokens = _tokens(method, target, logp_BxT, entropy_BxT)
  seen = tokens.mask_BxT > 0
  weight, keep = method.correction(tokens)
  held_back = weight * keep * method.emphasis(tokens)
  trust_BxT, surrogate_BxT = method.trust(method.ratio(tokens), tokens)
  kl_BxT, kl_value_BxT = method.kl(tokens)
  c_BxT = target.weight_BxT * held_back * trust_BxT * tokens.advantage_BxT
  c_BxT = jnp.where(seen, c_BxT + target.weight_BxT * kl_BxT, 0.0)
  moved = tokens.advantage_BxT != 0
  sums = {
    'pg_loss': -(target.weight_BxT * held_back * surrogate_BxT).sum(),
    'clipped': (seen & (trust_BxT == 0) & moved).sum().astype(jnp.float32),
    'rejected': (seen & (keep == 0) & moved).sum().astype(jnp.float32),
    'kl': jnp.where(seen, tokens.behaviour_BxT - tokens.logp_BxT, 0.0).sum(),
    'kl_loss': jnp.where(seen, target.weight_BxT * kl_value_BxT, 0.0).sum(),
  }
  return jax.lax.stop_gradient(c_BxT), sums


def scale(method: Method, target: Targets, logp_BxT: jax.Array) -> jax.Array:
  """A factor on the learning rate for this minibatch, all rows at once. Source: by the functions chosen."""
  return method.lr_scale(_tokens(method, target, logp_BxT, None))


def _tokens(
  method: Method, target: Targets, logp_BxT: jax.Array, entropy_BxT: jax.Array | None
) -> Tokens:
  """Everything the stages see, without gradients and without what lies where the mask is 0."""
  seen = target.mask_BxT > 0
  old_BxT = target.behaviour_BxT if target.old_BxT is None else target.old_BxT

  def clean(x):
    return None if x is None else jnp.where(seen, jax.lax.stop_gradient(x), 0.0)

  tokens = Tokens(
    logp_BxT=clean(logp_BxT),
    old_BxT=clean(old_BxT),
    behaviour_BxT=clean(target.behaviour_BxT),
    mask_BxT=target.mask_BxT,
    advantage_BxT=target.advantage_BxT,
    correct_B=target.correct_B,
    group_B=target.group_B,
    reference_BxT=clean(target.reference_BxT),
    entropy_BxT=clean(entropy_BxT),
    age_BxT=target.age_BxT,
    moved_BxT=target.moved_BxT,
  )
  return tokens._replace(old_BxT=method.proximal(tokens))
