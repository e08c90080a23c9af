"""Where a rollout forks and which branch is dropped: a function here makes the rules, `tree.generate` obeys them.

Named in `config.rollout.tree.fn`. TreeRules see every row once a token, with fixed shapes; they are pure functions
of that and of statistics that they keep per row, and know nothing of caches, seats or groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import token_similarity
from jaxrl_llm.types import UserError


class Fork(NamedTuple):
  """What each row wants to go on with."""

  own_B: jax.Array  # the row's own next token
  more_BxK: jax.Array  # the next tokens of children, all different from the row's own
  wanted_BxK: jax.Array  # which of them ask for a row; earlier columns go first


class BranchState(NamedTuple):
  """The tree as pruning sees it, after this round's tokens are written."""

  tokens_BxT: jax.Array
  length_B: jax.Array
  parent_B: jax.Array  # the row that a row left; itself for a root
  born_B: jax.Array  # the number of the token with which it left; 0 for a root
  running_B: jax.Array  # neither finished nor idle


class TreeRules(NamedTuple):
  """When to fork, when to drop, and for how long."""

  start: Callable[[int], Any]  # rows → statistics, any tree of arrays [B, ...]
  observe: Callable  # (statistics, logits_BxV, age_B) → statistics; age: tokens since birth
  branch: Callable[..., Fork]  # (statistics, logits_BxV, sampled_B, column_B)
  due: Callable[[BranchState], jax.Array]  # children that must be judged now
  drop: Callable[[BranchState, Any], jax.Array]  # which of those go
  pending: Callable[[BranchState], jax.Array]  # children that may yet have to go
  limit: int  # tokens after which a group only samples
  share: Callable[[jax.Array], jax.Array]  # step → share η of the groups that grow as trees


def none() -> None:
  """No trees: every rollout is a sample of its own. Source: none."""
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

  A child is compared with its parent when it is `ages` tokens old, each over the tokens since the fork,
  and goes when suffix_match > suffix, rouge_l > rouge or edit_distance < edit; a window that holds an end
  is not compared. 1, 1 and 0 switch a measure off. Defaults are those for mathematics; countdown took
  absolute 0.25, relative 0.15, suffix 1, rouge 1, edit 0.4, limit 512. From step `starts[i]` on the share
  η of groups is `shares[i]`; the paper mixes rows inside every group instead of groups.

  Left out of the official code: not comparing where the parent's first token is a mathematical symbol,
  which needs text. It ends the tree phase of all groups at once, when 98 % of the rows are in use, and
  waits one token longer. Source: arXiv:2510.24302 (LATR).
  """
  _check(ages, limit, starts, shares)
  oldest = max(ages)

  def due(seen: BranchState) -> jax.Array:
    age_B = seen.length_B - seen.born_B
    return _compared(seen) & (age_B[:, None] == jnp.asarray(ages)[None]).any(1)

  def drop(seen: BranchState, _: Any) -> jax.Array:
    child_BxW, parent_BxW = _windows(seen, min(oldest, seen.tokens_BxT.shape[1]))
    measure = lambda fn: jax.vmap(fn)(child_BxW, parent_BxW)  # noqa: E731
    alike_B = jnp.zeros(len(child_BxW), bool)
    if suffix < 1:
      alike_B |= measure(token_similarity.suffix_match) > suffix
    if rouge < 1:
      alike_B |= measure(token_similarity.rouge_l) > rouge
    if edit > 0:
      alike_B |= measure(token_similarity.edit_distance) < edit
    return alike_B

  return TreeRules(
    start=lambda rows: (),
    observe=lambda statistics, logits_BxV, age_B: statistics,
    branch=lambda _, logits_BxV, sampled_B, column_B: _second(logits_BxV, absolute, relative),
    due=due,
    drop=drop,
    pending=lambda seen: _compared(seen) & (seen.length_B - seen.born_B < oldest),
    limit=limit,
    share=_stairs(starts, shares),
  )


def _second(logits_BxV: jax.Array, absolute: float, relative: float) -> Fork:
  """The likeliest token, and the second where it is likely and close enough."""
  p_Bx2, token_Bx2 = jax.lax.top_k(jax.nn.softmax(logits_BxV), 2)
  wanted_B = (p_Bx2[:, 1] > absolute) & (p_Bx2[:, 0] - p_Bx2[:, 1] < relative)
  return Fork(token_Bx2[:, 0], token_Bx2[:, 1:], wanted_B[:, None])


def _compared(seen: BranchState) -> jax.Array:
  """Children whose window and whose parent's hold no end."""
  child_B = seen.parent_B != jnp.arange(len(seen.parent_B))
  return child_B & seen.running_B & seen.running_B[seen.parent_B]


def _windows(seen: BranchState, width: int) -> tuple[jax.Array, jax.Array]:
  """Child's and parent's tokens since the fork, right-aligned in `width` columns, −1 in front.

  A parent that runs is as long as its child: a group's rows write the same column every round.
  """
  column_BxW = seen.length_B[:, None] + jnp.arange(-width, 0)[None]
  real_BxW = column_BxW >= seen.born_B[:, None]
  cut = lambda tokens: jnp.where(  # noqa: E731
    real_BxW, jnp.take_along_axis(tokens, jnp.maximum(column_BxW, 0), axis=1), -1
  )
  return cut(seen.tokens_BxT), cut(seen.tokens_BxT[seen.parent_B])


class _Signals(NamedTuple):
  """ECHO's running statistics; the newest number of a window is its last."""

  entropy_BxW: jax.Array  # nats
  confidence_BxW: jax.Array
  rise_B: jax.Array  # entropy less the mean of the window before it
  group_B: jax.Array  # mean confidence over the group window
  tail_B: jax.Array  # mean confidence over the tail window
  least_B: jax.Array  # smallest group confidence so far
  drops_B: jax.Array  # how often in a row the tail fell
  rises_B: jax.Array  # how often in a row the rise was above 0


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

  H is the entropy (nats) of the next token, ΔH = H − its mean over the last `window` tokens, C the mean of
  the `top_k` largest probabilities, over a window too. The fork has clip(round(1 + α·(H − entropy_low)/
  (entropy − entropy_low) − β·(C − confidence)/confidence), 1, width) ways: the sampled token and the
  likeliest others. A child goes when its C was ever below `floor`; when C over `tail_window` tokens fell
  `drops` times in a row to at most `tail`; or when ΔH was above 0 `rises` times in a row and is above
  `spike`. A child's statistics begin at its fork.

  The sign of C is the paper's: large is sure. The released code takes −mean log p instead, of which the
  least value is ln 5 = 1.61 for five tokens, while it asks for C ≤ 1.2 to fork: it never does, its floor of
  0.4 and tail of 1.0 are never reached, and a mistyped key stops it before that. As C ≤ 1/top_k here, those
  numbers would gate nothing (1.2) and drop every child (0.4): confidence, floor and tail are defaults of
  our own, not tuned. Also ours: any running row may fork, at every token, where the code forks the first
  rollout once; a dropped child gives its row back, where the code keeps it cut; roots stay.
  Source: arXiv:2602.02150 (ECHO), formulas from its code, sign from the paper.
  """
  _check((1,), limit, starts, shares)
  if width < 2 or top_k < 1 or window < 1 or tail_window < 1 or confidence <= 0:
    raise UserError(
      f'config.rollout.tree: width={width} must be at least 2, top_k={top_k}, window={window} and '
      f'tail_window={tail_window} at least 1, confidence={confidence} above 0; change those that are not.'
    )

  def branch(s: _Signals, logits_BxV, sampled_B, column_B) -> Fork:
    H_B, C_B = s.entropy_BxW[:, -1], s.group_B
    gate_B = (H_B >= entropy) & (s.rise_B >= rise) & (C_B <= confidence) & (column_B >= depth)
    steep_B = alpha * (H_B - entropy_low) / max(entropy - entropy_low, 1e-9)
    ways_B = jnp.clip(jnp.round(1 + steep_B - beta * (C_B - confidence) / confidence), 1, width)
    more_BxK = _others(logits_BxV, sampled_B, width - 1)
    wanted_BxK = gate_B[:, None] & (jnp.arange(more_BxK.shape[1])[None] < ways_B[:, None] - 1)
    return Fork(sampled_B, more_BxK, wanted_BxK)

  def drop(_: BranchState, s: _Signals) -> jax.Array:
    fell_B = (s.drops_B >= drops) & (s.tail_B <= tail)
    rose_B = (s.rises_B >= rises) & (s.rise_B > spike)
    return (s.least_B < floor) | fell_B | rose_B

  def children(seen: BranchState) -> jax.Array:
    return (seen.parent_B != jnp.arange(len(seen.parent_B))) & seen.running_B

  return TreeRules(
    start=lambda rows: _no_signals(rows, max(window + 1, tail_window)),
    observe=lambda s, logits_BxV, age_B: _observed(
      s, logits_BxV, age_B, top_k, window, tail_window
    ),
    branch=branch,
    # At 1 they are the parent's.
    due=lambda seen: children(seen) & (seen.length_B - seen.born_B > 1),
    drop=drop,
    pending=children,
    limit=limit,
    share=_stairs(starts, shares),
  )


def _others(logits_BxV: jax.Array, sampled_B: jax.Array, count: int) -> jax.Array:
  """The `count` likeliest tokens other than the sampled one, likeliest first."""
  _, token_BxK = jax.lax.top_k(logits_BxV, min(count + 1, logits_BxV.shape[-1]))
  last_BxK = jnp.argsort(token_BxK == sampled_B[:, None], axis=1, stable=True)
  return jnp.take_along_axis(token_BxK, last_BxK, axis=1)[:, :count]


def _no_signals(rows: int, width: int) -> _Signals:
  zero_B, zero_BxW = jnp.zeros(rows), jnp.zeros((rows, width))
  count_B = jnp.zeros(rows, jnp.int32)
  return _Signals(
    zero_BxW, zero_BxW, zero_B, zero_B, zero_B, jnp.full(rows, jnp.inf), count_B, count_B
  )


def _observed(
  s: _Signals, logits_BxV, age_B, top_k: int, window: int, tail_window: int
) -> _Signals:
  """The statistics with one more distribution. What a row saw before its birth does not count."""
  logp_BxV = jax.nn.log_softmax(logits_BxV)
  entropy_B = -(jnp.exp(logp_BxV) * logp_BxV).sum(-1)
  confidence_B = jnp.exp(jax.lax.top_k(logp_BxV, min(top_k, logp_BxV.shape[-1]))[0]).mean(-1)
  # A child of one token has seen one distribution, that of its fork: age_B says how many there were.
  push = lambda x_BxW, new_B: jnp.concatenate([x_BxW[:, 1:], new_B[:, None]], axis=1)  # noqa: E731
  entropy_BxW = push(s.entropy_BxW, entropy_B)
  confidence_BxW = push(s.confidence_BxW, confidence_B)
  before_B = _recent(entropy_BxW[:, :-1], jnp.minimum(age_B, window))
  rise_B = jnp.where(age_B > 0, entropy_B - before_B, 0.0)
  group_B = _recent(confidence_BxW, jnp.minimum(age_B + 1, window))
  tail_B = _recent(confidence_BxW, jnp.minimum(age_B + 1, tail_window))
  newborn_B, first_B = age_B == 1, s.confidence_BxW[:, -1]
  fell_B = tail_B < jnp.where(newborn_B, first_B, s.tail_B)
  again = lambda count_B: jnp.where(newborn_B, 0, count_B)  # noqa: E731
  return _Signals(
    entropy_BxW,
    confidence_BxW,
    rise_B,
    group_B,
    tail_B,
    jnp.minimum(group_B, jnp.where(newborn_B, first_B, s.least_B)),
    jnp.where(fell_B & (age_B > 0), again(s.drops_B) + 1, 0),
    jnp.where(rise_B > 0, again(s.rises_B) + 1, 0),
  )


def _recent(x_BxW: jax.Array, count_B: jax.Array) -> jax.Array:
  """Mean of the last `count_B` columns; 0 of none."""
  W = x_BxW.shape[1]
  counts_BxW = jnp.arange(W)[None] >= W - count_B[:, None]
  return jnp.where(counts_BxW, x_BxW, 0).sum(1) / jnp.maximum(count_B, 1)


def _stairs(starts: Sequence[int], shares: Sequence[float]) -> Callable[[jax.Array], jax.Array]:
  """`shares[i]` from step `starts[i]` on, of a traced step."""

  def share(step: jax.Array) -> jax.Array:
    index = jnp.searchsorted(jnp.asarray(starts), step, side='right') - 1
    return jnp.asarray(shares, jnp.float32)[jnp.maximum(index, 0)]

  return share


def _check(ages, limit, starts, shares) -> None:
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
