"""Tree decoding: the rollouts of a group grow as a tree, where a row forks into an idle row of its group.

Every row has its own slot. A group that grows as a tree starts with row 0 alone, the root. A fork copies a row: its
tokens, log-probabilities, versions, statistics and cache, in one gather of rows. Then both rows write different tokens
into the same column. All running rows of a growing group have the same length. An iteration without forks gathers
nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import ring_decode, sampling, slot_loop
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, LoopConstants, LoopState
from jaxrl_llm.rollout.tree_rules import BranchState, TreeRules
from jaxrl_llm.types import UNFINISHED, ModelConfig, Rollout

_GROUP_KEY = 2**31 - 2  # folded into the key: groups are chosen with separate noise


class Tree(NamedTuple):
  """How the rows of a rollout descend from each other."""

  parent_B: jax.Array  # the row of the same group that a row was copied from; itself for a root
  born_B: jax.Array  # number of the row's first token of its own; 0 for a root
  grown_P: jax.Array  # whether the group grew as a tree
  forks: jax.Array  # children, dropped ones included
  drops: jax.Array  # rows dropped, with their descendants


class _Constants(NamedTuple):
  """Values that the loop reads and does not change."""

  loop: LoopConstants
  rules: TreeRules
  token_B: jax.Array  # first token of a row that starts at its prompt
  logp_B: jax.Array


class _State(NamedTuple):
  loop: LoopState  # slot b decodes row b
  tree: Tree
  growing_P: jax.Array  # groups that may still fork and drop
  statistics: Any  # of the rules, [B, ...]


def generate(
  model: ModelConfig,
  settings: DecodeSettings,
  inputs: DecodeInputs,
  rules: TreeRules,
  *,
  share: jax.Array | float = 1.0,
) -> tuple[Rollout, jax.Array, Tree]:
  """As `ring_decode.generate`, with a share of the groups grown as trees; also returns the tree.

  `share` is a traced number from 0 to 1, or one per prompt [P]: group p grows iff u(key, born, index) < share. The
  other groups equal those of `ring_decode.generate`, token by token. A growing group forks by `rules.branch` while it
  has idle rows. Requests beyond these are refused: first columns are served first, then lower rows. Children that
  `rules.drop` names return their rows, with all their descendants.

  A group stops growing when it is full and no child is still to be compared, when no row runs, or at `rules.limit`
  tokens. Then each row samples with its own noise. Rows still idle start at the prompt, with the tokens that
  `ring_decode.generate` samples for them.

  Where `rules.is_sampled`, every row alone is a sample of the policy. Else the tokens of the tree phase are chosen by
  a rule and are none. Recorded is the policy's own log-probability of them, temperature included, so an objective's
  ratio starts at 1. Nothing corrects for the choice, as in the official code: learn from it as from off-policy data.

  Rules read logits at temperature 1. Rows that share a prefix have the same tokens, log-probabilities and versions
  there. arXiv:2510.24302 (LATR), arXiv:2602.02150 (ECHO), arXiv:2509.06040 (BranchGRPO).
  """
  G = settings.rollouts
  # Trees start at their prompts and have no carried cache.
  inputs = inputs._replace(continued=None, carried=None)
  loop, first, logits_PxV = slot_loop.prepare(model, settings, inputs)
  token_BxT, logp_BxT = cast(jax.Array, first.tokens_BxT), cast(jax.Array, first.logp_BxT)
  constants = _Constants(loop, rules, token_BxT[:, 0], logp_BxT[:, 0])
  keys_P = sampling.row_keys(jax.random.fold_in(inputs.key, _GROUP_KEY), loop.prompts, 1)
  state = _begin(constants, sampling.uniforms(keys_P, 0) < share)
  # At the first token caches are empty, so a fork there does not copy them.
  cache, bare = state.loop.cache, state._replace(loop=state.loop._replace(cache=[]))
  logits_BxV = jnp.repeat(logits_PxV, G, axis=0)
  state = _advance(constants, bare, logits_BxV, constants.token_B, constants.logp_B)
  state = state._replace(loop=state.loop._replace(cache=cache))
  state = jax.lax.while_loop(
    lambda s: slot_loop.any_shard(loop, _running(s).any()),
    lambda s: _iterate(constants, s),
    state,
  )
  return state.loop.rollout, state.loop.iterations, state.tree


def counts(tree: Tree) -> dict[str, jax.Array]:
  """Counts that add up over shards: groups grown, children forked, rows dropped, rows that are children at the end."""
  children = (tree.parent_B != jnp.arange(len(tree.parent_B))).sum()
  return dict(groups=tree.grown_P.sum(), forks=tree.forks, drops=tree.drops, rows=children)


def _begin(constants: _Constants, growing_P: jax.Array) -> _State:
  """The state before the first token; all rows of a growing group but the first one are idle."""
  loop, rows_B = constants.loop, jnp.arange(len(constants.token_B), dtype=jnp.int32)
  B, G, T = len(rows_B), loop.settings.rollouts, loop.settings.max_tokens
  empty = slot_loop.empty_rollout(B, T)
  state = slot_loop.start_loop(loop, empty, False, slot_loop.ring_widths(loop.model, T))
  idle_B = jnp.repeat(growing_P, G) & (rows_B % G > 0)
  state = state._replace(row_S=jnp.where(idle_B, B, rows_B), index_S=jnp.full(B, -1, jnp.int32))
  zero = jnp.int32(0)
  tree = Tree(rows_B, jnp.zeros(B, jnp.int32), growing_P, zero, zero)
  return _State(state, tree, growing_P, constants.rules.start(B))


def _running(state: _State) -> jax.Array:
  return state.loop.row_S < len(state.loop.row_S)


def _used(state: _State) -> jax.Array:
  """Rows that run or have finished; the others are idle."""
  return _running(state) | (state.loop.rollout.reason_B != UNFINISHED)


def _iterate(constants: _Constants, state: _State) -> _State:
  """One decode iteration: one token for every running row."""
  fixed, loop = constants.loop, state.loop
  logits_BxV, cache, _ = ring_decode.decode(fixed, loop)
  uniform_B = sampling.uniforms(fixed.keys_B, loop.index_S + 1)
  token_B, logp_B = sampling.sample(
    logits_BxV, uniform_B, fixed.settings.temperature, fixed.settings.token_filter
  )
  state = state._replace(
    loop=loop._replace(iterations=loop.iterations + 1, column=loop.column + 1, cache=cache)
  )
  return _advance(constants, state, logits_BxV, token_B, logp_B)


def _advance(
  constants: _Constants,
  state: _State,
  logits_BxV: jax.Array,
  sampled_B: jax.Array,
  logp_B: jax.Array,
) -> _State:
  """Writes the next token of every running row and of its children; then prunes, and ends groups' growth."""
  fixed, rules, G = constants.loop, constants.rules, constants.loop.settings.rollouts
  rows_B, running_B = jnp.arange(len(sampled_B), dtype=jnp.int32), _running(state)
  index_B = state.loop.index_S + 1
  growing_B = jnp.repeat(state.growing_P, G) & running_B
  statistics = rules.observe(state.statistics, logits_BxV, index_B - state.tree.born_B)
  fork = rules.branch(statistics, logits_BxV, sampled_B, index_B)
  source_B, choice_B = _assign_forks(fork.wanted_BxK & growing_B[:, None], _used(state), G)
  child_B = source_B != rows_B
  if rules.is_sampled:
    drawn_B, drawn_logp_B = _draw(fixed, logits_BxV, index_B, source_B)
    token_B = jnp.where(child_B, drawn_B, sampled_B)
    logp_B = jnp.where(child_B, drawn_logp_B, logp_B)
  else:
    ruled_B = jnp.where(child_B, fork.more_BxK[source_B, choice_B], fork.own_B)
    by_rule_B = growing_B | child_B
    token_B = jnp.where(by_rule_B, ruled_B, sampled_B)
    ruled_logp_B = _log_prob(logits_BxV, source_B, token_B, fixed.settings.temperature)
    logp_B = jnp.where(by_rule_B, ruled_logp_B, logp_B)

  state = state._replace(loop=state.loop._replace(index_S=index_B), statistics=statistics)
  copy = lambda s: _copy_rows(s, source_B, child_B)  # noqa: E731
  state = jax.lax.cond(slot_loop.any_shard(fixed, child_B.any()), copy, lambda s: s, state)
  loop = state.loop
  row_B = jnp.where(running_B | child_B, rows_B, len(rows_B))
  rollout = slot_loop.record_tokens(fixed, loop.rollout, row_B, loop.index_S, token_B, logp_B)
  row_B = jnp.where(rollout.reason_B == UNFINISHED, row_B, len(rows_B))
  state = state._replace(loop=loop._replace(rollout=rollout, row_S=row_B))
  return _end_growth(constants, _prune(constants, state))


def _assign_forks(wanted_BxK: jax.Array, used_B: jax.Array, G: int) -> tuple[jax.Array, jax.Array]:
  """Assigns each group's idle rows to fork requests: (row to copy, itself where none; column of the request), [B].

  Column 0 of every row is served before column 1 of any, lower rows before higher ones; the lowest idle row first.
  """
  B, K = wanted_BxK.shape
  wanted_PxN = wanted_BxK.reshape(B // G, G, K).swapaxes(1, 2).reshape(B // G, K * G)
  queue_PxN = jnp.argsort(~wanted_PxN, axis=1, stable=True)
  idle_PxG = ~used_B.reshape(B // G, G)
  rank_PxG = jnp.cumsum(idle_PxG, axis=1) - 1
  served_PxG = idle_PxG & (rank_PxG < wanted_PxN.sum(1, keepdims=True))
  request_PxG = jnp.take_along_axis(queue_PxN, jnp.clip(rank_PxG, 0, K * G - 1), axis=1)
  row_PxG = jnp.arange(B).reshape(B // G, G)
  source_PxG = jnp.where(served_PxG, row_PxG[:, :1] + request_PxG % G, row_PxG)
  return source_PxG.reshape(B).astype(jnp.int32), (request_PxG // G).reshape(B)


def _draw(
  fixed: LoopConstants, logits_BxV: jax.Array, index_B: jax.Array, source_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The next token of row `source`, number `index[source]`, with the row's own noise, and its log-prob: both [B]."""
  uniform_B = sampling.uniforms(fixed.keys_B, index_B[source_B])
  settings = fixed.settings
  return sampling.sample(
    logits_BxV[source_B], uniform_B, settings.temperature, settings.token_filter
  )


def _log_prob(
  logits_BxV: jax.Array, source_B: jax.Array, token_B: jax.Array, temperature: float
) -> jax.Array:
  """log softmax(logits[source] / temperature)[token]; greedy (0) counts at temperature 1, as in sampling."""
  scaled_BxV = logits_BxV / (temperature or 1.0)
  total_B = jax.nn.logsumexp(scaled_BxV, axis=-1)
  return scaled_BxV[source_B, token_B] - total_B[source_B]


def _copy_rows(state: _State, source_B: jax.Array, child_B: jax.Array) -> _State:
  """Copies rows `source_B`, caches included, in one gather."""
  loop, tree = state.loop, state.tree
  take = lambda x: x.at[source_B].get(mode='promise_in_bounds')  # noqa: E731
  loop = loop._replace(
    index_S=take(loop.index_S),
    rollout=jax.tree.map(take, loop.rollout),
    cache=jax.tree.map(take, loop.cache),
  )
  tree = tree._replace(
    parent_B=jnp.where(child_B, source_B, tree.parent_B),
    born_B=jnp.where(child_B, loop.index_S, tree.born_B),
    forks=tree.forks + child_B.sum(),
  )
  return state._replace(loop=loop, tree=tree, statistics=jax.tree.map(take, state.statistics))


def _branches(state: _State) -> BranchState:
  rollout, tree = state.loop.rollout, state.tree
  return BranchState(
    rollout.tokens_BxT, rollout.length_B, tree.parent_B, tree.born_B, _running(state)
  )


def _prune(constants: _Constants, state: _State) -> _State:
  """Compares the children that are due; the rows of dropped ones become idle again."""
  fixed, rules, branches = constants.loop, constants.rules, _branches(state)
  G = fixed.settings.rollouts
  due_B = rules.due(branches) & jnp.repeat(state.growing_P, G)

  def drop(rollout: Rollout, tree: Tree) -> tuple[Rollout, Tree, jax.Array]:
    gone_B, up_B = due_B & rules.drop(branches, state.statistics), tree.parent_B
    for _ in range(G.bit_length()):  # descendants of 1, 2, 4… generations
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
    slot_loop.any_shard(fixed, due_B.any()), drop, keep, state.loop.rollout, state.tree
  )
  row_S = jnp.where(gone_B, len(gone_B), state.loop.row_S)
  return state._replace(loop=state.loop._replace(rollout=rollout, row_S=row_S), tree=tree)


def _end_growth(constants: _Constants, state: _State) -> _State:
  """Ends the growth of finished groups: their rows sample from here on, and their idle rows start at the prompt."""
  loop, rows_B = state.loop, jnp.arange(len(constants.token_B), dtype=jnp.int32)
  B, G = len(rows_B), constants.loop.settings.rollouts
  group = lambda x: x.reshape(B // G, G)  # noqa: E731
  running_PxG, used_PxG = group(_running(state)), group(_used(state))
  pending_PxG = group(constants.rules.pending(_branches(state)))
  long_PxG = running_PxG & (group(loop.rollout.length_B) >= constants.rules.limit)
  full_P = used_PxG.all(1) & ~pending_PxG.any(1)
  ends_P = state.growing_P & (full_P | ~running_PxG.any(1) | long_PxG.any(1))
  starts_B = jnp.repeat(ends_P, G) & ~_used(state)
  rollout = slot_loop.record_tokens(
    constants.loop,
    loop.rollout,
    jnp.where(starts_B, rows_B, B),
    jnp.zeros_like(rows_B),
    constants.token_B,
    constants.logp_B,
  )
  unfinished_B = starts_B & (rollout.reason_B == UNFINISHED)
  loop = loop._replace(
    rollout=rollout,
    row_S=jnp.where(unfinished_B, rows_B, loop.row_S),
    index_S=jnp.where(starts_B, 0, loop.index_S),
  )
  return state._replace(loop=loop, growing_P=state.growing_P & ~ends_P)
