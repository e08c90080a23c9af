"""Rollouts of a group grow as a tree inside the decode loop: a row forks into an idle row of its group.

Every row has its slot. Of a group that grows as a tree only row 0 lives at first, the root. A fork copies a
row: its tokens, log-probabilities, versions, statistics and cache, which is one gather of rows, and then both
write different tokens into the same column. All running rows of a growing group are equally long. Nothing is
gathered in a round without forks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import ring_decode, sampling, slot_loop
from jaxrl_llm.rollout.tree_rules import BranchState, TreeRules
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts, Rollout

_CHOICE = 2**31 - 2  # folded into the key: the noise that chooses groups is none of the sampler's


class Tree(NamedTuple):
  """How the rows of a rollout hang together."""

  parent_B: jax.Array  # the row of the same group that a row left; itself where it left none
  born_B: jax.Array  # the number of the token with which it left; 0 where it left none
  grown_P: jax.Array  # whether the group grew as a tree
  forks: jax.Array  # children made, dropped ones too
  drops: jax.Array  # rows given back, with all that descended from them


class _Plan(NamedTuple):
  """What the loop reads and does not change."""

  fixed: slot_loop.Fixed
  rules: TreeRules
  token_B: jax.Array  # of a row that starts at its prompt
  logp_B: jax.Array


class _State(NamedTuple):
  loop: slot_loop.Carry  # slot b decodes row b
  tree: Tree
  growing_P: jax.Array  # groups that may still fork and drop
  statistics: Any  # of the rules, [B, ...]


def generate(
  model: ModelConfig,
  params: Any,
  prompts: Prompts,
  key: jax.Array,
  version: jax.Array,
  spec: slot_loop.DecodeSettings,
  rules: TreeRules,
  *,
  share: jax.Array | float = 1.0,
  cap: jax.Array | int | None = None,
) -> tuple[Rollout, jax.Array, Tree]:
  """As `engine.generate`, with `share` of the groups grown as trees; also returns the tree.

  `share` is a traced number from 0 to 1, or one per prompt [P]: group p grows iff u(key, born, index) <
  share. All other groups are, token for token, what `engine.generate` samples. A growing group forks as
  `rules.branch` says while it has idle rows; requests beyond those are refused, first columns first,
  then lower rows first. Children that `rules.drop` names give their rows back, with all their descendants.
  The group turns to ordinary sampling, each row with its own noise from there on, when it is full and no
  child is still to be judged, when no row runs, or at `rules.limit` tokens. Rows still idle then are
  ordinary samples from the prompt, those that `engine.generate` gives the same rows.

  The tree phase is not a sample of the policy: its tokens are chosen by a rule. What is recorded is the
  policy's own log-probability of them, temperature included, so that an objective's ratio starts at 1
  and nothing corrects for the choice, as in the official code: learn from it as from off-policy data.

  TreeRules read logits at temperature 1. Rows that share a prefix hold the same tokens, log-probabilities
  and versions there. Source: arXiv:2510.24302 (LATR), arXiv:2602.02150 (ECHO); rows as seats: none.
  """
  G = spec.rollouts
  fixed, first, logits_PxV = slot_loop.prepare(model, params, prompts, key, version, spec, cap=cap)
  plan = _Plan(fixed, rules, first.tokens_BxT[:, 0], first.logp_BxT[:, 0])
  keys_P = sampling.row_keys(jax.random.fold_in(key, _CHOICE), fixed.prompts, 1)
  state = _begin(plan, sampling.uniforms(keys_P, 0) < share)
  # A fork at the first token finds nothing in the caches: they stay out of it.
  cache, bare = state.loop.cache, state._replace(loop=state.loop._replace(cache=[]))
  state = _advance(plan, bare, jnp.repeat(logits_PxV, G, axis=0), plan.token_B, plan.logp_B)
  state = state._replace(loop=state.loop._replace(cache=cache))
  state = jax.lax.while_loop(
    lambda s: slot_loop.anywhere(fixed, _running(s).any()), lambda s: _iterate(plan, s), state
  )
  return state.loop.rollout, state.loop.iterations, state.tree


def counts(tree: Tree) -> dict[str, jax.Array]:
  """Numbers that add up over shards: groups grown, children made and dropped, rows left of a fork.

  Source: none.
  """
  left = (tree.parent_B != jnp.arange(len(tree.parent_B))).sum()
  return dict(groups=tree.grown_P.sum(), forks=tree.forks, drops=tree.drops, rows=left)


def _begin(plan: _Plan, growing_P: jax.Array) -> _State:
  """Nothing written yet; a growing group's rows but its first one are idle."""
  fixed, rows_B = plan.fixed, jnp.arange(len(plan.token_B), dtype=jnp.int32)
  B, G = len(rows_B), fixed.spec.rollouts
  empty = slot_loop.empty_rollout(B, fixed.spec.max_tokens)
  loop = slot_loop.begin(
    fixed, empty, False, slot_loop.ring_widths(fixed.model, fixed.spec.max_tokens)
  )
  idle_B = jnp.repeat(growing_P, G) & (rows_B % G > 0)
  loop = loop._replace(row_S=jnp.where(idle_B, B, rows_B), at_S=jnp.full(B, -1, jnp.int32))
  zero = jnp.int32(0)
  tree = Tree(rows_B, jnp.zeros(B, jnp.int32), growing_P, zero, zero)
  return _State(loop, tree, growing_P, plan.rules.start(B))


def _running(state: _State) -> jax.Array:
  return state.loop.row_S < len(state.loop.row_S)


def _used(state: _State) -> jax.Array:
  """Rows that run or have finished; the others are idle."""
  return _running(state) | (state.loop.rollout.reason_B != UNFINISHED)


def _iterate(plan: _Plan, state: _State) -> _State:
  """One token for every running row."""
  fixed, loop = plan.fixed, state.loop
  logits_BxV, cache, _ = ring_decode.decode(fixed, loop)
  uniform_B = sampling.uniforms(fixed.keys_B, loop.at_S + 1)
  token_B, logp_B = sampling.sample(logits_BxV, uniform_B, fixed.spec.temperature, fixed.spec.token_filter)
  state = state._replace(
    loop=loop._replace(iterations=loop.iterations + 1, column=loop.column + 1, cache=cache)
  )
  return _advance(plan, state, logits_BxV, token_B, logp_B)


def _advance(plan: _Plan, state: _State, logits_BxV, sampled_B, logp_B) -> _State:
  """Writes every running row's next token and its children's, then drops and, where it is time, settles."""
  fixed, rules, G = plan.fixed, plan.rules, plan.fixed.spec.rollouts
  rows_B, running_B = jnp.arange(len(sampled_B), dtype=jnp.int32), _running(state)
  column_B = state.loop.at_S + 1
  growing_B = jnp.repeat(state.growing_P, G) & running_B
  statistics = rules.observe(state.statistics, logits_BxV, column_B - state.tree.born_B)
  fork = rules.branch(statistics, logits_BxV, sampled_B, column_B)
  source_B, choice_B = _seats(fork.wanted_BxK & growing_B[:, None], _used(state), G)
  child_B = source_B != rows_B
  ruled_B = jnp.where(child_B, fork.more_BxK[source_B, choice_B], fork.own_B)
  by_rule_B = growing_B | child_B
  token_B = jnp.where(by_rule_B, ruled_B, sampled_B)
  ruled_logp_B = _log_prob(logits_BxV, source_B, token_B, fixed.spec.temperature)
  logp_B = jnp.where(by_rule_B, ruled_logp_B, logp_B)

  state = state._replace(loop=state.loop._replace(at_S=column_B), statistics=statistics)
  copy = lambda s: _copy(s, source_B, child_B)  # noqa: E731
  state = jax.lax.cond(slot_loop.anywhere(fixed, child_B.any()), copy, lambda s: s, state)
  loop = state.loop
  row_B = jnp.where(running_B | child_B, rows_B, len(rows_B))
  rollout = slot_loop.record(fixed, loop.rollout, row_B, loop.at_S, token_B, logp_B)
  row_B = jnp.where(rollout.reason_B == UNFINISHED, row_B, len(rows_B))
  state = state._replace(loop=loop._replace(rollout=rollout, row_S=row_B))
  return _settle(plan, _prune(plan, state))


def _seats(wanted_BxK: jax.Array, used_B: jax.Array, G: int) -> tuple[jax.Array, jax.Array]:
  """Hands each group's idle rows to its requests: the row each row copies (itself: none) and which request.

  Column 0 of every row goes before column 1 of any, lower rows before higher ones; lowest idle row first.
  """
  B, K = wanted_BxK.shape
  wanted_PxN = wanted_BxK.reshape(B // G, G, K).swapaxes(1, 2).reshape(B // G, K * G)
  queue_PxN = jnp.argsort(~wanted_PxN, axis=1, stable=True)
  idle_PxG = ~used_B.reshape(B // G, G)
  rank_PxG = jnp.cumsum(idle_PxG, axis=1) - 1
  served_PxG = idle_PxG & (rank_PxG < wanted_PxN.sum(1, keepdims=True))
  request_PxG = jnp.take_along_axis(queue_PxN, jnp.clip(rank_PxG, 0, K * G - 1), axis=1)
  own_PxG = jnp.arange(B).reshape(B // G, G)
  source_PxG = jnp.where(served_PxG, own_PxG[:, :1] + request_PxG % G, own_PxG)
  return source_PxG.reshape(B).astype(jnp.int32), (request_PxG // G).reshape(B)


def _log_prob(logits_BxV, source_B, token_B, temperature: float) -> jax.Array:
  """log softmax(logits[source] / temperature)[token]; greedy (0) counts at temperature 1, as in sampling."""
  scaled_BxV = logits_BxV / (temperature or 1.0)
  total_B = jax.nn.logsumexp(scaled_BxV, axis=-1)
  return scaled_BxV[source_B, token_B] - total_B[source_B]


def _copy(state: _State, source_B: jax.Array, child_B: jax.Array) -> _State:
  """The one gather of rows, caches and all."""
  loop, tree = state.loop, state.tree
  take = lambda x: x.at[source_B].get(mode='promise_in_bounds')  # noqa: E731
  loop = loop._replace(
    at_S=take(loop.at_S),
    rollout=jax.tree.map(take, loop.rollout),
    cache=jax.tree.map(take, loop.cache),
  )
  tree = tree._replace(
    parent_B=jnp.where(child_B, source_B, tree.parent_B),
    born_B=jnp.where(child_B, loop.at_S, tree.born_B),
    forks=tree.forks + child_B.sum(),
  )
  return state._replace(loop=loop, tree=tree, statistics=jax.tree.map(take, state.statistics))


def _seen(state: _State) -> BranchState:
  rollout, tree = state.loop.rollout, state.tree
  return BranchState(rollout.tokens_BxT, rollout.length_B, tree.parent_B, tree.born_B, _running(state))


def _prune(plan: _Plan, state: _State) -> _State:
  """Children whose time has come are judged; those that go become idle rows again."""
  rules, seen, G = plan.rules, _seen(state), plan.fixed.spec.rollouts
  due_B = rules.due(seen) & jnp.repeat(state.growing_P, G)

  def judge(rollout: Rollout, tree: Tree) -> tuple[Rollout, Tree, jax.Array]:
    gone_B, up_B = due_B & rules.drop(seen, state.statistics), tree.parent_B
    for _ in range(G.bit_length()):  # 1, 2, 4… generations
      gone_B, up_B = gone_B | gone_B[up_B], up_B[up_B]
    tree = tree._replace(
      parent_B=jnp.where(gone_B, jnp.arange(len(gone_B)), tree.parent_B),
      born_B=jnp.where(gone_B, 0, tree.born_B),
      drops=tree.drops + gone_B.sum(),
    )
    blank = lambda x: jnp.where(gone_B.reshape(-1, *[1] * (x.ndim - 1)), 0, x)  # noqa: E731
    blanked = jax.tree.map(blank, rollout)._replace(weight_B=rollout.weight_B)
    return blanked, tree, gone_B

  keep = lambda rollout, tree: (rollout, tree, jnp.zeros_like(due_B))  # noqa: E731
  rollout, tree, gone_B = jax.lax.cond(
    slot_loop.anywhere(plan.fixed, due_B.any()), judge, keep, state.loop.rollout, state.tree
  )
  row_S = jnp.where(gone_B, len(gone_B), state.loop.row_S)
  return state._replace(loop=state.loop._replace(rollout=rollout, row_S=row_S), tree=tree)


def _settle(plan: _Plan, state: _State) -> _State:
  """Groups that are done growing sample from here on, and what is idle in them begins at the prompt."""
  loop, rows_B = state.loop, jnp.arange(len(plan.token_B), dtype=jnp.int32)
  B, G = len(rows_B), plan.fixed.spec.rollouts
  group = lambda x: x.reshape(B // G, G)  # noqa: E731
  running_PxG, used_PxG = group(_running(state)), group(_used(state))
  pending_PxG = group(plan.rules.pending(_seen(state)))
  long_PxG = running_PxG & (group(loop.rollout.length_B) >= plan.rules.limit)
  full_P = used_PxG.all(1) & ~pending_PxG.any(1)
  ends_P = state.growing_P & (full_P | ~running_PxG.any(1) | long_PxG.any(1))
  starts_B = jnp.repeat(ends_P, G) & ~_used(state)
  rollout = slot_loop.record(
    plan.fixed,
    loop.rollout,
    jnp.where(starts_B, rows_B, B),
    jnp.zeros_like(rows_B),
    plan.token_B,
    plan.logp_B,
  )
  goes_on_B = starts_B & (rollout.reason_B == UNFINISHED)
  loop = loop._replace(
    rollout=rollout,
    row_S=jnp.where(goes_on_B, rows_B, loop.row_S),
    at_S=jnp.where(starts_B, 0, loop.at_S),
  )
  return state._replace(loop=loop, growing_P=state.growing_P & ~ends_P)
