"""Token sampling: one uniform number per row, and a two-level search of the cumulative distribution."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import exact
from jaxrl_llm.types import Prompts

BLOCK = 256  # vocabulary entries per first-level sum
# Large vocabularies have a multiple of so many blocks. Up to so many devices then share whole blocks; otherwise every
# token would gather the logits.
_BLOCK_MULTIPLE = 16
_PART_OFFSET = 2**30  # above all rollout numbers that are folded into a prompt's key


def prompt_keys(key: jax.Array, prompts: Prompts) -> jax.Array:
  """One typed key per prompt slot [P]: fold(fold(key, born), prompt index), independent of the order of slots.

  `key` comes from the run's seed. `born` is the step that proposed the prompt, so a continued row draws the same
  tokens. The second and later slots of a prompt fold their number in as well.
  """
  fold = jax.random.fold_in
  key_P = jax.vmap(lambda s, i: fold(fold(key, s), i))(prompts.born_P, prompts.index_P)
  if prompts.part_P is None:
    return key_P
  others = jax.vmap(fold)(key_P, _PART_OFFSET + prompts.part_P)
  return jnp.where(prompts.part_P > 0, others, key_P)


def row_keys(
  key: jax.Array, prompts: Prompts, rollouts: int, member_B: jax.Array | None = None
) -> jax.Array:
  """One typed key per row b = (p, g), [P * rollouts]: fold(the prompt slot's key, g).

  `member_B` is g where it is not b % rollouts.
  """
  rows = len(prompts.index_P) * rollouts
  member_B = jnp.arange(rows) % rollouts if member_B is None else member_B
  return jax.vmap(jax.random.fold_in)(jnp.repeat(prompt_keys(key, prompts), rollouts), member_B)


def uniforms(keys_B: jax.Array, position_B: jax.Array | int) -> jax.Array:
  """One uniform in [0, 1) per row for the token at `position_B`, a number or [B]."""
  position_B = jnp.broadcast_to(position_B, keys_B.shape)
  return jax.vmap(lambda k, t: jax.random.uniform(jax.random.fold_in(k, t)))(keys_B, position_B)


def redraw(key: jax.Array, prompts: Prompts, rollouts: int, born_BxT: jax.Array) -> jax.Array:
  """The uniforms [B, T] that drew token t of row b with the noise of step born[b, t]."""
  member_B = jnp.arange(len(born_BxT)) % rollouts
  rows = prompts._replace(index_P=jnp.repeat(prompts.index_P, rollouts), part_P=None)

  def column(t, born_B):
    return uniforms(row_keys(key, rows._replace(born_P=born_B), 1, member_B), t)

  T = born_BxT.shape[1]
  return jax.vmap(column, in_axes=(0, 1), out_axes=1)(jnp.arange(T), born_BxT)


class TokenFilter(NamedTuple):
  """Restricts sampling to likely tokens; the default allows every token."""

  top_k: int = 0  # the k likeliest; 0: all
  top_p: float = 1.0  # the fewest likeliest whose probabilities reach p
  min_p: float = 0.0  # those at least p times as likely as the likeliest


NO_FILTER = TokenFilter()


@jax.named_scope('sampling')
def sample(
  logits_BxV: jax.Array,
  uniform_B: jax.Array,
  temperature: float,
  token_filter: TokenFilter = NO_FILTER,
  greedy_B: jax.Array | None = None,
  is_exact: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """A token from softmax(logits / temperature) by inverse CDF, and its log-probability, both [B].

  token = min{v : Σ_{w≤v} p_w > u}. Inverse transform sampling needs one random number per row, Gumbel noise V of them.
  Temperature 0 is greedy: the largest logit, with its log-probability at temperature 1. With a filter the
  log-probability is that of the filtered distribution. Rows of `greedy_B` take the largest logit, too.
  """
  given_BxV = logits_BxV
  if temperature != 0:
    logits_BxV = exact.tempered(logits_BxV, temperature) if is_exact else logits_BxV / temperature
    logits_BxV = filter_logits(logits_BxV, token_filter)
  block_BxMxK = _in_blocks(logits_BxV)
  top_B = block_BxMxK.max(-1).max(-1)
  sum_BxM = jnp.exp(block_BxMxK - top_B[:, None, None]).sum(-1)
  if temperature == 0:
    token_B = _likeliest(given_BxV)
  else:
    token_B = _inverse_cdf(block_BxMxK, top_B, sum_BxM, uniform_B)
    if greedy_B is not None:  # division by the temperature may round two logits to the same one
      token_B = jnp.where(greedy_B, _likeliest(given_BxV), token_B)
  if is_exact:
    total_B, _ = exact.partition_and_entropy(logits_BxV)
  else:
    total_B = jnp.log(sum_BxM.sum(-1)) + top_B
  return token_B.astype(jnp.int32), _at(logits_BxV, token_B) - total_B


def top_tokens(
  logits_BxV: jax.Array, temperature: float, count: int, is_exact: bool = False
) -> tuple[jax.Array, jax.Array]:
  """The `count` likeliest tokens of softmax(logits / temperature) and their log-probabilities, both [B, K]."""
  if is_exact:
    logits_BxV = exact.tempered(logits_BxV, temperature)
    total_B, _ = exact.partition_and_entropy(logits_BxV)
  else:
    logits_BxV = logits_BxV / temperature
    total_B = jax.nn.logsumexp(logits_BxV, axis=-1)
  value_BxK, token_BxK = jax.lax.top_k(logits_BxV, count)
  return token_BxK.astype(jnp.int32), value_BxK - total_B[:, None]


def _at(x_BxN: jax.Array, index_B: jax.Array) -> jax.Array:
  """Row b's entry index_B[b] along the second axis: a gather along one axis, which XLA can keep sharded."""
  index = index_B.reshape(-1, *[1] * (x_BxN.ndim - 1))
  return jnp.take_along_axis(x_BxN, index, axis=1)[:, 0]


def filter_logits(logits_BxV: jax.Array, token_filter: TokenFilter) -> jax.Array:
  """Logits with −inf for excluded tokens: top-k, then top-p, then min-p, each on the remaining tokens.

  arXiv:1805.04833 (top-k), arXiv:1904.09751 (top-p), arXiv:2407.01082 (min-p).
  """
  top_k, top_p, min_p = token_filter
  if 0 < top_k < logits_BxV.shape[-1]:
    least_Bx1 = jax.lax.top_k(logits_BxV, top_k)[0][:, -1:]
    logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
  if top_p < 1:
    logits_BxV = nucleus(logits_BxV, top_p)
  if min_p > 0:
    least_Bx1 = logits_BxV.max(-1, keepdims=True) + jnp.log(min_p)
    logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
  return logits_BxV


def nucleus(logits_BxV: jax.Array, top_p: jax.Array | float) -> jax.Array:
  """Logits with −inf for tokens outside the fewest likeliest whose probabilities reach `top_p`, a number or [B, 1].

  arXiv:1904.09751.
  """
  sorted_BxV = -jnp.sort(-logits_BxV, axis=-1)
  before_BxV = jnp.cumsum(jax.nn.softmax(sorted_BxV), axis=-1) - jax.nn.softmax(sorted_BxV)
  count_Bx1 = (before_BxV < top_p).sum(-1, keepdims=True)  # at least the likeliest token
  least_Bx1 = jnp.take_along_axis(sorted_BxV, jnp.maximum(count_Bx1, 1) - 1, axis=-1)
  return jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)


def _likeliest(logits_BxV: jax.Array) -> jax.Array:
  """The token of each row's largest logit, the first of several; XLA's argmax over V is slow on CPUs."""
  block_BxMxK = _in_blocks(logits_BxV)
  block_B = jnp.argmax(block_BxMxK.max(-1), axis=-1)
  return block_B * BLOCK + jnp.argmax(_at(block_BxMxK, block_B), axis=-1)


def _in_blocks(logits_BxV: jax.Array) -> jax.Array:
  """Logits [B, M, K] in blocks, −inf behind the last one."""
  B, V = logits_BxV.shape
  blocks = -(-V // BLOCK)
  if blocks >= _BLOCK_MULTIPLE:
    blocks = -(-blocks // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE
  padded = jnp.pad(logits_BxV, ((0, 0), (0, blocks * BLOCK - V)), constant_values=-jnp.inf)
  return padded.reshape(B, blocks, BLOCK)


def _inverse_cdf(
  block_BxMxK: jax.Array, top_B: jax.Array, sum_BxM: jax.Array, uniform_B: jax.Array
) -> jax.Array:
  """The token of each row: first its block by the sums of blocks, then its place in the block."""
  edge_BxM = jnp.cumsum(sum_BxM, axis=-1)
  block_B, rest_B = _search(edge_BxM, uniform_B * edge_BxM[:, -1])
  weight_BxK = jnp.exp(_at(block_BxMxK, block_B) - top_B[:, None])
  inside_BxK = jnp.cumsum(weight_BxK, axis=-1)
  # By rounding, a block's own sum may differ from the difference of edges: clip the goal into the block's mass.
  offset_B, _ = _search(inside_BxK, jnp.minimum(rest_B, inside_BxK[:, -1] * (1 - 2**-22)))
  return block_B * BLOCK + offset_B


def _search(sums_BxN: jax.Array, goal_B: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The first index whose cumulative sum exceeds the goal, and the goal minus the sum before it."""
  index_B = jnp.argmax(sums_BxN > goal_B[:, None], axis=-1)
  before = jnp.take_along_axis(sums_BxN, jnp.maximum(index_B - 1, 0)[:, None], axis=-1)[:, 0]
  return index_B, goal_B - jnp.where(index_B > 0, before, 0.0)
