"""Forward passes of the update: the learned rows of a minibatch in packed microbatches, and single rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import lora, packing
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decoder, linear, logprob, shared_prompt_forward
from jaxrl_llm.types import Batch, Params, Prompts, TrainState

Tree = TypeVar('Tree')
Total = TypeVar('Total')


def policy_weights(spec: StepSpec, base: Params, params: Params) -> Params:
  """Weights for a forward pass: `params`, or with LoRA the frozen `base` beside the adapter `params`."""
  if base is None or spec.model.lora is None:
    return params
  return lora.join(base, params, spec.model.lora.alpha)


def reference_weights(state: TrainState) -> Params:
  """The weights at the start of the run; with LoRA the frozen base, of which there is no copy."""
  return state.reference if state.base is None else state.base


def by_prompt(spec: StepSpec, batch: Batch) -> Batch:
  """The batch with arrays of rows [B, …] as [P, G, …], so that the first axis of every array is P."""
  G = spec.layout.group
  group = lambda x: x.reshape(x.shape[0] // G, G, *x.shape[1:])  # noqa: E731
  rows = batch._replace(prompts=None, demo=None)
  return jax.tree.map(group, rows)._replace(prompts=batch.prompts, demo=batch.demo)


def by_row(batch: Batch) -> Batch:
  """The inverse of `by_prompt`."""
  rows = batch._replace(prompts=None, demo=None)
  row = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # noqa: E731
  return jax.tree.map(row, rows)._replace(prompts=batch.prompts, demo=batch.demo)


class PackedBatch(NamedTuple):
  """A minibatch and the plan of passes over some of its rows; arrays lead with Z shards of rows."""

  plan: packing.Plan
  rows: packing.Rows
  prompt_ZxPxL: jax.Array  # int32, tokens
  completion_ZxBxT: jax.Array  # int32, tokens
  expert_ZxBxTxNxk: jax.Array | None
  order_P: jax.Array  # int32, the prompts in the order of the shards
  microbatches: jax.Array  # int32 []

  def without_routes(self) -> PackedBatch:
    """The same rows for weights that did not sample them: their own routers choose the experts."""
    return self._replace(expert_ZxBxTxNxk=None)


class Microbatch(NamedTuple):
  """One pass: the layout of its tokens, and what the model reads. R = Z·N bins."""

  layout: packing.Layout  # arrays lead with Z
  tokens_RxS: jax.Array
  target_ZxU: jax.Array  # int32, the predicted tokens
  expert_RxSxNxk: jax.Array | None  # int32, −1 where the router chooses
  identity_RxS: jax.Array  # int32, a number for each token of the minibatch, which keys its noise

  def take_rows(self, arrays: Tree) -> Tree:
    """The rows [Z·F, …] of arrays [Z, B, …]; 0 in places without a row."""
    take = jax.vmap(lambda x_B, row_F: x_B.at[row_F].get(mode='fill', fill_value=0))
    return jax.tree.map(lambda x_ZxB: _merge(take(x_ZxB, self.layout.row_F)), arrays)

  def to_rows(self, x_ZxU: jax.Array) -> jax.Array:
    """Values of predicted tokens as [Z·F, T], 0 after the end of a row."""
    index_ZxFxT = self.layout.index_FxT
    Z, F, T = index_ZxFxT.shape
    x_ZxFT = jnp.take_along_axis(x_ZxU, index_ZxFxT.reshape(Z, F * T), axis=1)
    return jnp.where(self.is_real, x_ZxFT.reshape(Z * F, T), 0)

  def to_tokens(self, x_RxT: jax.Array) -> jax.Array:
    """The inverse of `to_rows`: [Z, U, …], 0 where no token is predicted."""
    Z, U = self.target_ZxU.shape
    x_ZxFxT = x_RxT.reshape(Z, -1, *x_RxT.shape[1:])
    pick = jax.vmap(lambda x, row, place: x[row, place])
    x_ZxU = pick(x_ZxFxT, self.layout.predicted_row_U, self.layout.predicted_place_U)
    is_used = jnp.arange(U)[None] < self.layout.used[:, None]
    return jnp.where(is_used.reshape(Z, U, *[1] * (x_ZxU.ndim - 2)), x_ZxU, 0)

  @property
  def is_real(self) -> jax.Array:
    """Whether a token of a row exists: bool [Z·F, T]."""
    return _merge(self.layout.is_real_FxT)


def pack(spec: StepSpec, batch: Batch, learned_B: jax.Array | None = None) -> PackedBatch:
  """The rows of a minibatch that `learned_B` selects, all by default, ready for passes over them.

  With several shards, prompts are dealt so that each shard has about equally many tokens.
  """
  length_B, prompts = batch.rollout.length_B, batch.prompts
  rows = packing.Rows(
    prompts.length_P, length_B, length_B > 0 if learned_B is None else learned_B.astype(bool)
  )
  shards = sharding.rows_shards(spec.layout.mesh, sharding.UPDATE_ROWS)
  expert_BxTxNxk = batch.rollout.expert_BxTxNxk
  if shards == 1 or expert_BxTxNxk is not None:  # recorded experts are too large to exchange
    order_P = jnp.arange(prompts.length_P.shape[0])
  else:
    order_P = packing.deal(shards, rows)
  split = functools.partial(_split, spec, order_P)
  rows_Z = packing.Rows(*map(split, rows))
  plan = jax.vmap(functools.partial(packing.make_plan, spec.update.packing))(rows_Z)
  return PackedBatch(
    plan,
    rows_Z,
    split(prompts.tokens_PxL),
    split(batch.rollout.tokens_BxT),
    None if expert_BxTxNxk is None else split(expert_BxTxNxk),
    order_P,
    -(-plan.bins.max() // spec.update.packing.bins),
  )


def accumulate(
  spec: StepSpec,
  packed: PackedBatch,
  arrays: Tree,
  add: Callable[[Total, Microbatch, Tree], Total],
  start: Total,
) -> Total:
  """`start` after `add(total, microbatch, arrays of its rows)` for every microbatch.

  `arrays` is any tree of arrays [B, …]; those of a microbatch are [Z·F, …], 0 in places without a row.
  """
  return accumulate_shards(spec, packed, split_arrays(spec, packed, arrays), add, start)


def split_arrays(spec: StepSpec, packed: PackedBatch, arrays: Tree) -> Tree:
  """Arrays [B, …] as [Z, …], the shards of rows of `packed`."""
  return jax.tree.map(functools.partial(_split, spec, packed.order_P), arrays)


def accumulate_shards(
  spec: StepSpec,
  packed: PackedBatch,
  by_shard: Tree,
  add: Callable[[Total, Microbatch, Tree], Total],
  start: Total,
  shard_Z: jax.Array | None = None,
) -> Total:
  """`accumulate` for arrays of `split_arrays`; `shard_Z` as in `take_microbatch`."""

  def body(number, total):
    microbatch = take_microbatch(spec, packed, number, shard_Z)
    return add(total, microbatch, microbatch.take_rows(by_shard))

  return jax.lax.fori_loop(0, packed.microbatches, body, start)


def take_microbatch(
  spec: StepSpec, packed: PackedBatch, number: jax.Array, shard_Z: jax.Array | None = None
) -> Microbatch:
  """Microbatch `number` [] of a packed minibatch.

  `shard_Z`: the places of the Z shards of `packed` among all shards of the mesh; default: they are all.
  """
  size, shards = spec.update.packing, sharding.rows_shards(spec.layout.mesh, sharding.UPDATE_ROWS)
  (Z, P, L), (B, T) = packed.prompt_ZxPxL.shape, packed.completion_ZxBxT.shape[1:]

  def one_shard(rows, plan, prompt_PxL, completion_BxT, expert_BxTxNxk, shard):
    layout = packing.lay_out(size, rows, plan, number, T)
    prompt, row, place = layout.column_prompt_NxS, layout.column_row_NxS, layout.place_NxS
    is_prompt = layout.is_prompt_NxS
    # `place` is one of a prompt or of a completion, and beyond the end of the other.
    in_prompt, in_row = jnp.minimum(place, L - 1), jnp.minimum(place, T - 1)
    tokens = jnp.where(is_prompt, prompt_PxL[prompt, in_prompt], completion_BxT[row, in_row])
    predicted_row_U = jnp.minimum(layout.row_F[layout.predicted_row_U], B - 1)
    target_U = completion_BxT[predicted_row_U, layout.predicted_place_U]
    expert = None
    if expert_BxTxNxk is not None:
      expert = expert_BxTxNxk[row, in_row].astype(jnp.int32)
      expert = jnp.where(is_prompt[..., None, None], -1, expert)
    # By prompt in the order of the minibatch, so that no plan changes a token's number.
    prompt = packed.order_P.reshape(shards, P)[shard][prompt]
    row = prompt * rows.group + row % rows.group
    identity = jnp.where(is_prompt, prompt * L + place, shards * P * L + row * T + place)
    return layout, tokens, target_U, expert, identity

  layout, tokens, target_ZxU, expert, identity = jax.vmap(one_shard)(
    packed.rows,
    packed.plan,
    packed.prompt_ZxPxL,
    packed.completion_ZxBxT,
    packed.expert_ZxBxTxNxk,
    jnp.arange(Z) if shard_Z is None else shard_Z,
  )
  expert = None if expert is None else _merge(expert)
  return Microbatch(layout, _merge(tokens), target_ZxU, expert, _merge(identity))


def packed_log_probs(
  spec: StepSpec,
  params: Params,
  microbatch: Microbatch,
  noise: tuple[jax.Array, jax.Array] | None = None,
  top: int = 0,
  entropy_gradient: bool = False,
  collision: bool = False,
  term: logprob.VocabularyTerm | None = None,
) -> tuple[jax.Array, ...]:
  """Log-probability and entropy [Z, U] of the predicted tokens of a microbatch.

  `noise` is a standard deviation per layer and a key; the others are those of `logprob.token_logp`. With
  `update.quantize` kernels are rounded. The gradient is that of rows with a prompt each.
  """
  if spec.update.quantize:
    params = linear.straight_through(params, spec.model.weights_dtype, spec.model.dtype)
  return logprob.token_logp(
    spec.model.config,
    params,
    packed_hidden_states(spec, params, microbatch, noise),
    microbatch.target_ZxU,
    temperature=spec.rollout.decode.temperature,
    chunk_tokens=spec.model.head_chunk_tokens,
    dtype=spec.model.dtype,
    top=top,
    used=microbatch.layout.used.max(),
    entropy_gradient=entropy_gradient,
    collision=collision,
    term=term,
  )


def packed_hidden_states(
  spec: StepSpec,
  params: Params,
  microbatch: Microbatch,
  noise: tuple[jax.Array, jax.Array] | None = None,
  shown: tuple[int, ...] = (),
) -> jax.Array:
  """The hidden state [Z, U, D] that predicts each predicted token, or outputs of the layers `shown` side by side."""
  layout, tokens_RxS = microbatch.layout, microbatch.tokens_RxS
  copy_RxS, part_RxS = _merge(layout.copy_NxS), _merge(layout.part_NxS)
  attend = spec.update.attention
  if attend is not None:
    attend = functools.partial(attend, segment_BxQ=copy_RxS)
  hidden_RxSxD, *_ = decoder.apply(
    spec.model.config,
    params,
    tokens_RxS,
    _merge(layout.position_NxS),
    attention_mask(copy_RxS, part_RxS, spec.model.config.is_exact),
    dtype=spec.model.dtype,
    remat=spec.update.remat,
    noise=None if noise is None else decoder.Noise(*noise, microbatch.identity_RxS),
    gather=sharding.layer_gather(spec.layout.mesh, spec.layout.rules),
    expert_BxQxNxk=microbatch.expert_RxSxNxk,
    attend=attend,
    shown=shown,
  )
  Z, D = microbatch.target_ZxU.shape[0], hidden_RxSxD.shape[-1]
  hidden_ZxNSxD = hidden_RxSxD.reshape(Z, -1, D)
  return jnp.take_along_axis(hidden_ZxNSxD, layout.source_U[..., None], axis=1)


def attention_mask(copy_RxS: jax.Array, part_RxS: jax.Array, parts: bool = False) -> jax.Array:
  """Bool [R, S, S]: a token attends to its copy of the prompt and to its own completion, up to itself."""
  S = copy_RxS.shape[1]
  same_copy = copy_RxS[:, :, None] == copy_RxS[:, None, :]
  part_of_key = part_RxS[:, None, :]
  visible = (part_of_key == 0) | (part_of_key == part_RxS[:, :, None])
  mask = same_copy & visible & (copy_RxS[:, None, :] > 0) & jnp.tril(jnp.ones((1, S, S), bool))
  # 1: a key of the row's prompt, 2: of its completion, which sampling sums apart
  return mask * jnp.where(part_of_key == 0, 1, 2).astype(jnp.int8) if parts else mask


def packed_scores(
  spec: StepSpec,
  packed: PackedBatch,
  score: Callable[[Microbatch], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
  """`score`, arrays [Z, U] of a microbatch, for all of them as arrays [B, T]: 0 in rows that are not planned."""
  Z, B, T = packed.completion_ZxBxT.shape

  def add(total, microbatch, _):
    def write(x_ZxBxT, x_ZxU):
      rows = microbatch.to_rows(x_ZxU).reshape(Z, -1, T)
      put = jax.vmap(lambda x_BxT, row_F, x_FxT: x_BxT.at[row_F].set(x_FxT, mode='drop'))
      return put(x_ZxBxT, microbatch.layout.row_F, rows)

    return tuple(map(write, total, score(microbatch)))

  first = jax.eval_shape(lambda: score(take_microbatch(spec, packed, jnp.int32(0))))
  start = tuple(jnp.zeros((Z, B, T), x.dtype) for x in first)
  scores = accumulate(spec, packed, (), add, start)
  P = packed.order_P.shape[0]

  def restore(x):
    blank = jnp.zeros((P, Z * B // P, T), x.dtype)
    return blank.at[packed.order_P].set(x.reshape(P, -1, T)).reshape(Z * B, T)

  return tuple(map(restore, scores))


def all_log_probs(
  spec: StepSpec,
  params: Params,
  packed: PackedBatch,
  noise: tuple[jax.Array, jax.Array] | None = None,
  top: int = 0,
  collision: bool = False,
) -> tuple[jax.Array, ...]:
  """`packed_log_probs` of all planned rows, each result [B, T], without a gradient."""
  params = jax.lax.stop_gradient(params)
  keywords = dict(noise=noise, top=top, collision=collision)
  score = functools.partial(packed_log_probs, spec, params, **keywords)
  return packed_scores(spec, packed, score)


def log_probs(
  spec: StepSpec,
  params: Params,
  prompts: Prompts,
  tokens_BxT: jax.Array,
  expert_BxTxNxk: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """Log-probability and entropy [B, T] of whole rows, without a plan."""
  if spec.update.quantize:
    params = linear.straight_through(params, spec.model.weights_dtype, spec.model.dtype)
  hidden_BxTxD = shared_prompt_forward.hidden(
    spec.model.config,
    params,
    prompts,
    tokens_BxT,
    dtype=spec.model.dtype,
    remat=spec.update.remat,
    attend=spec.update.attention,
    gather=sharding.layer_gather(spec.layout.mesh, spec.layout.rules),
    expert_BxTxNxk=expert_BxTxNxk,
  )
  return logprob.token_logp(
    spec.model.config,
    params,
    hidden_BxTxD,
    tokens_BxT,
    temperature=spec.rollout.decode.temperature,
    chunk_tokens=spec.model.head_chunk_tokens,
    dtype=spec.model.dtype,
  )


def _split(spec: StepSpec, order_P: jax.Array, x: jax.Array) -> jax.Array:
  """[P, …] or [P·G, …] as [Z, …] shards of rows, with the prompts in the order `order_P`."""
  P, Z = order_P.shape[0], sharding.rows_shards(spec.layout.mesh, sharding.UPDATE_ROWS)
  if Z == 1:
    return x[None]
  x = x.reshape(P, x.shape[0] // P, *x.shape[1:])[order_P]
  x = x.reshape(Z, P // Z * x.shape[1], *x.shape[2:])
  rows = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(sharding.UPDATE_ROWS))
  return jax.lax.with_sharding_constraint(x, rows)


def _merge(x: jax.Array) -> jax.Array:
  return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
