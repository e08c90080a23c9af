"""Tree rules: where a rollout forks and which branches are dropped. `tree_decode.generate` applies them.

The functions are named in `config.rollout.tree.fn`. Rules see all rows after every token, with fixed shapes. They are
pure functions of the rows and of statistics that they keep per row; caches, slots and groups are not visible to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import token_similarity
from jaxrl_llm.types import Array, UserError


class Fork(NamedTuple):
  """The next tokens of each row and of its requested children."""

  own_B: jax.Array  # the row's next token
  more_BxK: jax.Array  # next tokens of children, all different from the row's
  wanted_BxK: jax.Array  # which children request a row; earlier columns are served first


class BranchState(NamedTuple):
  """The tree after an iteration's tokens are written, as pruning reads it."""

  tokens_BxT: Array
  length_B: Array
  parent_B: jax.Array  # the row that a row was copied from; itself for a root
  born_B: jax.Array  # number of the row's first token of its own; 0 for a root
  running_B: jax.Array  # neither finished nor idle


class TreeRules(NamedTuple):
  """When rows fork, when children are dropped, and for how long a group grows."""

  start: Callable[[int], Any]  # rows → statistics, a pytree of arrays [B, ...]
  # (statistics, logits_BxV, age_B) → statistics; age: tokens since the fork
  observe: Callable[[Any, jax.Array, jax.Array], Any]
  branch: Callable[..., Fork]  # (statistics, logits_BxV, sampled_B, index_B)
  due: Callable[[BranchState], jax.Array]  # children to compare now
  drop: Callable[[BranchState, Any], jax.Array]  # which of these are dropped
  pending: Callable[[BranchState], jax.Array]  # children that may still be dropped
  limit: int  # tokens after which a group only samples
  share: Callable[[jax.Array], jax.Array]  # step → share η of the groups that grow as trees
  # rows sample, and a child draws the token of its fork with its own noise; `own` and `more` of a fork are not read
  is_sampled: bool = False


def none() -> None:
  """No trees: every rollout is sampled separately."""
  return None


def latr(
  *,
  absolute: float = 0.15,
  relative: float = 0.25,
  ages: Sequence[int] = (20, 30, 50),
  suffix: float = 0.2,
  rouge: float = 0.5,
  edit: float = 0.0,
  limit: int = 1024,
  starts: Sequence[int] = (0, 100, 200, 300),
  shares: Sequence[float] = (1.0, 0.75, 0.5, 0.25),
) -> TreeRules:
  """Rows are greedy; a second branch opens where p₂ > absolute and p₁ − p₂ < relative (at temperature 1).

  A child is compared with its parent when it is `ages` tokens old, over the tokens since the fork. It is dropped when
  suffix_match > suffix, rouge_l > rouge or edit_distance < edit. A window that contains an end is not compared. The
  values 1, 1 and 0 disable a measure. The defaults are those for mathematics; countdown used absolute 0.25, relative
  0.15, suffix 1, rouge 1, edit 0.4, limit 512. From step `starts[i]` on the share η of groups is `shares[i]`; the paper
  mixes rows inside every group instead of groups.

  Left out of the official code: no comparison where the parent's first token is a mathematical symbol, which needs
  text. It ends the tree phase of all groups at once, when 98 % of the rows are in use, and waits one token longer.
  arXiv:2510.24302 (LATR).
  """
  _check(ages, limit, starts, shares)
  oldest = max(ages)

  def due(branches: BranchState) -> jax.Array:
    age_B = branches.length_B - branches.born_B
    return _comparable(branches) & (age_B[:, None] == jnp.asarray(ages)[None]).any(1)

  def drop(branches: BranchState, _: Any) -> jax.Array:
    child_BxW, parent_BxW = _windows(branches, min(oldest, branches.tokens_BxT.shape[1]))
    measure = lambda fn: jax.vmap(fn)(child_BxW, parent_BxW)  # noqa: E731
    similar_B = jnp.zeros(len(child_BxW), bool)
    if suffix < 1:
      similar_B |= measure(token_similarity.suffix_match) > suffix
    if rouge < 1:
      similar_B |= measure(token_similarity.rouge_l) > rouge
    if edit > 0:
      similar_B |= measure(token_similarity.edit_distance) < edit
    return similar_B

  def pending(branches: BranchState) -> jax.Array:
    return _comparable(branches) & (branches.length_B - branches.born_B < oldest)

  return TreeRules(
    start=lambda rows: (),
    observe=lambda statistics, logits_BxV, age_B: statistics,
    branch=lambda _, logits_BxV, sampled_B, index_B: _second_likeliest(
      logits_BxV, absolute, relative
    ),
    due=due,
    drop=drop,
    pending=pending,
    limit=limit,
    share=_step_function(starts, shares),
  )


def branch_grpo(*, splits: Sequence[int] = (0, 3, 6, 9)) -> TreeRules:
  """Every running row forks in two before its tokens number `splits`, from 0, while its group has idle rows.

  A child draws its token with its own noise, and may draw its parent's. So each row alone is a sample of the policy,
  and 2^k rows of a group share what was drawn before the last k splits. After the last split, rows that are still idle
  start at the prompt. The official code splits the denoising of images, at steps 0, 3, 6 and 9 of 20, into 16 rows.
  arXiv:2509.06040 (BranchGRPO).
  """
  where = 'config.rollout.tree.splits'
  if not isinstance(splits, Sequence) or isinstance(splits, str):
    raise UserError(f'{where}={splits!r} must be a list of numbers, such as [0, {splits}].')
  if not splits or min(splits) < 0 or list(splits) != sorted(set(splits)):
    raise UserError(f'{where}={list(splits)} must rise, with at least one number, from 0 up.')

  def branch(_: tuple, logits_BxV: jax.Array, sampled_B: jax.Array, index_B: jax.Array) -> Fork:
    del logits_BxV
    wanted_B = (index_B[:, None] == jnp.asarray(splits)[None]).any(1)
    return Fork(sampled_B, sampled_B[:, None], wanted_B[:, None])

  never = lambda branches: jnp.zeros(len(branches.parent_B), bool)  # noqa: E731
  return TreeRules(
    start=lambda rows: (),
    observe=lambda statistics, logits_BxV, age_B: statistics,
    branch=branch,
    due=never,
    drop=lambda branches, _: never(branches),
    pending=never,
    limit=max(splits) + 1,
    share=_step_function((0,), (1.0,)),
    is_sampled=True,
  )


def _second_likeliest(logits_BxV: jax.Array, absolute: float, relative: float) -> Fork:
  """The likeliest token, and a child with the second where that is likely and close enough."""
  p_Bx2, token_Bx2 = jax.lax.top_k(jax.nn.softmax(logits_BxV), 2)
  wanted_B = (p_Bx2[:, 1] > absolute) & (p_Bx2[:, 0] - p_Bx2[:, 1] < relative)
  return Fork(token_Bx2[:, 0], token_Bx2[:, 1:], wanted_B[:, None])


def _comparable(branches: BranchState) -> jax.Array:
  """Children that run and whose parents run: neither window contains an end."""
  child_B = branches.parent_B != jnp.arange(len(branches.parent_B))
  return child_B & branches.running_B & branches.running_B[branches.parent_B]


def _windows(branches: BranchState, width: int) -> tuple[jax.Array, jax.Array]:
  """The child's and the parent's tokens since the fork, right-aligned in `width` columns, −1 in front.

  A running parent is as long as its child: the rows of a group write the same column in every iteration.
  """
  column_BxW = branches.length_B[:, None] + jnp.arange(-width, 0)[None]
  real_BxW = column_BxW >= branches.born_B[:, None]
  window = lambda tokens: jnp.where(  # noqa: E731
    real_BxW, jnp.take_along_axis(tokens, jnp.maximum(column_BxW, 0), axis=1), -1
  )
  return window(branches.tokens_BxT), window(branches.tokens_BxT[branches.parent_B])


class _Signals(NamedTuple):
  """ECHO's running statistics; the last column of a window is the newest."""

  entropy_BxW: jax.Array  # nats
  confidence_BxW: jax.Array
  rise_B: jax.Array  # entropy minus the mean of the window before it
  group_B: jax.Array  # mean confidence over the group window
  tail_B: jax.Array  # mean confidence over the tail window
  least_B: jax.Array  # smallest group confidence so far
  drops_B: jax.Array  # consecutive falls of the tail confidence
  rises_B: jax.Array  # consecutive rises above 0


# ECHO's confidence C has the sign of the paper: large means confident. The released code takes −mean log p instead, of
# which the least value is ln 5 = 1.61 for five tokens, while it forks at C ≤ 1.2. So it never forks, its floor of 0.4
# and tail of 1.0 are never reached, and a mistyped key stops it before that. As C ≤ 1/top_k here, those numbers would
# gate nothing (1.2) and drop every child (0.4); confidence, floor and tail are untuned defaults of this project.
def echo(
  *,
  entropy: float = 3.5,
  entropy_low: float = 1.0,
  rise: float = 0.2,
  confidence: float = 0.1,
  width: int = 4,
  alpha: float = 2.0,
  beta: float = 1.0,
  depth: int = 4,
  top_k: int = 5,
  window: int = 4,
  tail_window: int = 8,
  floor: float = 0.02,
  tail: float = 0.05,
  drops: int = 3,
  spike: float = 0.5,
  rises: int = 3,
  limit: int = 1024,
  starts: Sequence[int] = (0,),
  shares: Sequence[float] = (1.0,),
) -> TreeRules:
  """Rows sample; a fork opens after `depth` tokens where H ≥ entropy, ΔH ≥ rise and C ≤ confidence.

  H is the entropy (nats) of the next token, and ΔH = H − its mean over the last `window` tokens. C is the mean of the
  `top_k` largest probabilities, over a window too. The fork has clip(round(1 + α·(H − entropy_low)/(entropy −
  entropy_low) − β·(C − confidence)/confidence), 1, width) branches: the sampled token and the likeliest others.

  A child is dropped when its C was ever below `floor`, or when C over `tail_window` tokens fell `drops` times in a row
  to at most `tail`. It is also dropped when ΔH was above 0 `rises` times in a row and exceeds `spike`. A child's
  statistics begin at its fork.

  Also ours: any running row may fork, at every token, where the code forks the first rollout once. A dropped child
  returns its row, where the code keeps it truncated; roots stay. arXiv:2602.02150 (ECHO), formulas from its code, sign
  from the paper.
  """
  _check((1,), limit, starts, shares)
  _check_windows(width, top_k, window, tail_window, confidence)
  fork = functools.partial(
    _echo_fork,
    entropy=(entropy_low, entropy),
    rise=rise,
    confidence=confidence,
    width=width,
    slopes=(alpha, beta),
    depth=depth,
  )

  return TreeRules(
    start=lambda rows: _initial_signals(rows, max(window + 1, tail_window)),
    observe=lambda s, logits_BxV, age_B: _updated_signals(
      s, logits_BxV, age_B, (top_k, window, tail_window)
    ),
    branch=fork,
    due=_children_with_statistics,
    drop=functools.partial(_echo_drop, floor=floor, falls=(drops, tail), rises=(rises, spike)),
    pending=_children,
    limit=limit,
    share=_step_function(starts, shares),
  )


def _check_windows(
  width: int, top_k: int, window: int, tail_window: int, confidence: float
) -> None:
  if width < 2 or top_k < 1 or window < 1 or tail_window < 1 or confidence <= 0:
    raise UserError(
      f'config.rollout.tree: width={width} must be at least 2, top_k={top_k}, window={window} and '
      f'tail_window={tail_window} at least 1, confidence={confidence} above 0; change those that are not.'
    )


def _echo_fork(
  s: _Signals,
  logits_BxV: jax.Array,
  sampled_B: jax.Array,
  index_B: jax.Array,
  *,
  entropy: tuple[float, float],
  rise: float,
  confidence: float,
  width: int,
  slopes: tuple[float, float],
  depth: int,
) -> Fork:
  """The sampled token, and children with the likeliest others where the gate opens; `entropy` is (low, gate)."""
  (low, high), (alpha, beta) = entropy, slopes
  H_B, C_B = s.entropy_BxW[:, -1], s.group_B
  gate_B = (H_B >= high) & (s.rise_B >= rise) & (C_B <= confidence) & (index_B >= depth)
  steep_B = alpha * (H_B - low) / max(high - low, 1e-9)
  ways_B = jnp.clip(jnp.round(1 + steep_B - beta * (C_B - confidence) / confidence), 1, width)
  more_BxK = _likeliest_others(logits_BxV, sampled_B, width - 1)
  wanted_BxK = gate_B[:, None] & (jnp.arange(more_BxK.shape[1])[None] < ways_B[:, None] - 1)
  return Fork(sampled_B, more_BxK, wanted_BxK)


def _echo_drop(
  _: BranchState,
  s: _Signals,
  *,
  floor: float,
  falls: tuple[int, float],
  rises: tuple[int, float],
) -> jax.Array:
  """Rows to drop; `falls` is (count, largest tail confidence), `rises` (count, least rise)."""
  fell_B = (s.drops_B >= falls[0]) & (s.tail_B <= falls[1])
  rose_B = (s.rises_B >= rises[0]) & (s.rise_B > rises[1])
  return (s.least_B < floor) | fell_B | rose_B


def _children_with_statistics(branches: BranchState) -> jax.Array:
  """Children older than one token; at age 1 the statistics are still the parent's."""
  return _children(branches) & (branches.length_B - branches.born_B > 1)


def _children(branches: BranchState) -> jax.Array:
  """Children that run."""
  return (branches.parent_B != jnp.arange(len(branches.parent_B))) & branches.running_B


def _likeliest_others(logits_BxV: jax.Array, sampled_B: jax.Array, count: int) -> jax.Array:
  """The `count` likeliest tokens other than the sampled one, [B, count], likeliest first."""
  _, token_BxK = jax.lax.top_k(logits_BxV, min(count + 1, logits_BxV.shape[-1]))
  last_BxK = jnp.argsort(token_BxK == sampled_B[:, None], axis=1, stable=True)
  return jnp.take_along_axis(token_BxK, last_BxK, axis=1)[:, :count]


def _initial_signals(rows: int, width: int) -> _Signals:
  zero_B, zero_BxW = jnp.zeros(rows), jnp.zeros((rows, width))
  count_B = jnp.zeros(rows, jnp.int32)
  return _Signals(
    zero_BxW, zero_BxW, zero_B, zero_B, zero_B, jnp.full(rows, jnp.inf), count_B, count_B
  )


def _updated_signals(
  s: _Signals, logits_BxV: jax.Array, age_B: jax.Array, sizes: tuple[int, int, int]
) -> _Signals:
  """The statistics with one more distribution; `sizes` are top_k, window and tail_window.

  Distributions from before a row's fork do not count.
  """
  top_k, window, tail_window = sizes
  logp_BxV = jax.nn.log_softmax(logits_BxV)
  entropy_B = -(jnp.exp(logp_BxV) * logp_BxV).sum(-1)
  confidence_B = jnp.exp(jax.lax.top_k(logp_BxV, min(top_k, logp_BxV.shape[-1]))[0]).mean(-1)
  # A child of one token has one distribution, that of its fork: age_B is the number of distributions before this one.
  push = lambda x_BxW, new_B: jnp.concatenate([x_BxW[:, 1:], new_B[:, None]], axis=1)  # noqa: E731
  entropy_BxW = push(s.entropy_BxW, entropy_B)
  confidence_BxW = push(s.confidence_BxW, confidence_B)
  before_B = _recent_mean(entropy_BxW[:, :-1], jnp.minimum(age_B, window))
  rise_B = jnp.where(age_B > 0, entropy_B - before_B, 0.0)
  group_B = _recent_mean(confidence_BxW, jnp.minimum(age_B + 1, window))
  tail_B = _recent_mean(confidence_BxW, jnp.minimum(age_B + 1, tail_window))
  newborn_B, first_B = age_B == 1, s.confidence_BxW[:, -1]
  fell_B = tail_B < jnp.where(newborn_B, first_B, s.tail_B)
  reset = lambda count_B: jnp.where(newborn_B, 0, count_B)  # noqa: E731
  return _Signals(
    entropy_BxW,
    confidence_BxW,
    rise_B,
    group_B,
    tail_B,
    jnp.minimum(group_B, jnp.where(newborn_B, first_B, s.least_B)),
    jnp.where(fell_B & (age_B > 0), reset(s.drops_B) + 1, 0),
    jnp.where(rise_B > 0, reset(s.rises_B) + 1, 0),
  )


def _recent_mean(x_BxW: jax.Array, count_B: jax.Array) -> jax.Array:
  """Mean of the last `count_B` columns; 0 where `count_B` is 0."""
  W = x_BxW.shape[1]
  recent_BxW = jnp.arange(W)[None] >= W - count_B[:, None]
  return jnp.where(recent_BxW, x_BxW, 0).sum(1) / jnp.maximum(count_B, 1)


def _step_function(
  starts: Sequence[int], shares: Sequence[float]
) -> Callable[[jax.Array], jax.Array]:
  """`shares[i]` from step `starts[i]` on, of a traced step."""

  def share(step: jax.Array) -> jax.Array:
    index = jnp.searchsorted(jnp.asarray(starts), step, side='right') - 1
    return jnp.asarray(shares, jnp.float32)[jnp.maximum(index, 0)]

  return share


def _check(ages: Sequence[int], limit: int, starts: Sequence[int], shares: Sequence[float]) -> None:
  where = 'config.rollout.tree'
  for name, value in dict(ages=ages, starts=starts, shares=shares).items():
    if not isinstance(value, Sequence) or isinstance(value, str):
      raise UserError(f'{where}.{name}={value!r} must be a list of numbers, such as [{value}].')
  if not ages or min(ages) < 1:
    raise UserError(f'{where}.ages={ages!r} must name at least one age of at least 1 token.')
  if limit < 1:
    raise UserError(f"{where}.limit={limit} must be at least 1 token; fn='none' grows no trees.")
  if len(starts) != len(shares) or not shares or list(starts) != sorted(set(starts)):
    raise UserError(
      f'{where}.starts={starts!r} must rise, with one of {where}.shares={shares!r} for each of them.'
    )
  if not all(0 <= share <= 1 for share in shares):
    raise UserError(f'{where}.shares={shares!r} must each be from 0 to 1.')
