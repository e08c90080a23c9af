"""The sampling half of the step: lays out the weights for decoding and runs a decode loop on each shard of the rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import lora
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.learner.verify_drafts import verify_drafts
from jaxrl_llm.models import linear, logprob, shared_prompt_forward
from jaxrl_llm.objective import record_checks
from jaxrl_llm.rollout import (
  carried_kv,
  draft_decode,
  ngram_drafts,
  pruned_decode,
  ring_decode,
  tree_decode,
)
from jaxrl_llm.rollout.decode_records import CarriedKV, DecodeInputs, DecodeSettings
from jaxrl_llm.rollout.draft_head import DraftHead, DraftHeadState
from jaxrl_llm.types import Metrics, ModelConfig, Params, Prompts, Rollout, TrainState, UserError

KnownAnswers = tuple[jax.Array, jax.Array]  # tokens_PxT and length_P
_SURE = -1e-4  # the largest log-probability of an answer


@jax.named_scope('generate')
@sharding.on_mesh
def generate(
  spec: StepSpec,
  state: TrainState,
  prompts: Prompts,
  begun: Rollout | None = None,
  draft: Rollout | None = None,
  cap: jax.Array | None = None,
) -> tuple[Rollout, Metrics, tuple[CarriedKV | None, ...]]:
  """G completions of each prompt, metrics, and the next `state.carried`, a queue of caches of unfinished rows.

  The oldest cache is removed and that of this call is appended. Weights are rounded and laid out for decoding once. A
  row that is empty in `begun` begins from the accepted tokens of `draft`. Raises UserError for a tree with either.
  """
  _check_inputs(spec, prompts, begun, draft)
  params = decode_weights(spec, state)
  metrics: Metrics = {}
  cap_tokens = jnp.int32(spec.rollout.decode.max_tokens if cap is None else cap)
  if draft is not None:
    begun, metrics['generate/draft_tokens_kept'] = verify_drafts(
      spec, params, state, prompts, draft, begun, cap_tokens
    )
  oldest = state.carried[0] if state.carried else None

  def local(params, head, seed, version, cap, prompts, begun, carried):
    if carried is not None:
      carried = carried_kv.reorder(carried, prompts, spec.rollout.decode.rollouts)
    inputs = DecodeInputs(
      params,
      prompts,
      jax.random.key(seed),
      version,
      continued=begun,
      cap=cap,
      carried=carried,
      prefix_tokens=spec.layout.prefix_tokens,
    )
    if spec.rollout.greedy_first:
      inputs = _with_greedy_rows(inputs, spec.rollout.decode.rollouts)
    rollout, iterations, new_cache, counts = _decode(spec, inputs, head)
    return rollout, iterations[None], new_cache, {k: v[None] for k, v in counts.items()}

  rows, everywhere = PartitionSpec(sharding.ROWS), PartitionSpec()
  rollout, iterations, new_cache, counts = jax.shard_map(
    local,
    mesh=spec.layout.mesh,
    in_specs=(
      sharding.expert_specs(params, spec.layout.mesh, spec.layout.rules),
      *[everywhere] * 4,
      *[rows] * 3,
    ),
    out_specs=rows,
    axis_names=set(sharding.ROWS),
    check_vma=False,
  )(params, state.rollout_head, state.seed, state.step, cap_tokens, prompts, begun, oldest)
  if spec.rollout.drafts.records_noise:
    rollout = rollout._replace(noise_BxT=_noise_steps(prompts, rollout, begun))
  metrics['generate/rounds'] = iterations.max().astype(jnp.float32)
  metrics |= {f'generate/{k}': v.sum().astype(jnp.float32) for k, v in counts.items()}
  return rollout, metrics, (*state.carried[1:], new_cache) if state.carried else ()


def _check_inputs(
  spec: StepSpec, prompts: Prompts, begun: Rollout | None, draft: Rollout | None
) -> None:
  record_checks.prompts(prompts)
  for rows in (begun, draft):
    if rows is not None:
      record_checks.rollout(rows)
  if spec.rollout.tree is not None and (begun is not None or draft is not None):
    raise UserError(
      "config.rollout.tree grows groups from their prompts: give no begun and no draft, or set fn='none'."
    )


def _with_greedy_rows(inputs: DecodeInputs, rollouts: int) -> DecodeInputs:
  """The first row of each prompt is greedy, and the others draw as if it were not there."""
  number_B = jnp.tile(jnp.arange(rollouts), len(inputs.prompts.length_P))
  return inputs._replace(member_B=jnp.maximum(number_B - 1, 0), greedy_B=number_B == 0)


@sharding.on_mesh
def predict_success(
  spec: StepSpec, state: TrainState, prompts: Prompts, rollout: Rollout
) -> jax.Array:
  """p_B, the correctness head's probability that each row is right, from its first tokens. arXiv:2603.24840 (ARRoL)."""
  pruning, dtype = spec.rollout.pruning, spec.model.dtype
  assert pruning is not None
  local = lambda params, head, prompts, rollout: pruned_decode.predict_success(  # noqa: E731
    spec.model.config, params, head, prompts, rollout, dtype, pruning
  )[0]
  rows, everywhere = PartitionSpec(sharding.ROWS), PartitionSpec()
  params = decode_weights(spec, state)
  return jax.shard_map(
    local,
    mesh=spec.layout.mesh,
    in_specs=(
      sharding.expert_specs(params, spec.layout.mesh, spec.layout.rules),
      everywhere,
      rows,
      rows,
    ),
    out_specs=rows,
    axis_names=set(sharding.ROWS),
    check_vma=False,
  )(params, state.rollout_head, prompts, rollout)


@sharding.on_mesh
def encode_prompts(
  spec: StepSpec, state: TrainState, prompts: Prompts, answers: KnownAnswers | None = None
) -> jax.Array:
  """float32 [P, D]: the policy's hidden state at the last token of each prompt, after the final norm.

  With `answers`, tokens_PxT and length_P, [P, D + 1]: last, log π(y | x) − log(1 − π(y | x)) of the answer y, nan where
  it is empty. The columns of `prompts` must be enough for each prompt and its answer.
  """
  record_checks.prompts(prompts)
  rows, params = PartitionSpec(sharding.ROWS), decode_weights(spec, state)
  encode = _last_hidden if answers is None else _with_odds
  return jax.shard_map(
    functools.partial(encode, spec),
    mesh=spec.layout.mesh,
    in_specs=(sharding.expert_specs(params, spec.layout.mesh, spec.layout.rules), rows, rows),
    out_specs=rows,
    axis_names=set(sharding.ROWS),
    check_vma=False,
  )(params, prompts, answers)


def _last_hidden(spec: StepSpec, params: Params, prompts: Prompts, answers: None) -> jax.Array:
  del answers
  model, dtype = spec.model.config, spec.model.dtype
  _, hidden_PxD = shared_prompt_forward.prefill(
    model, params, prompts, dtype, spec.layout.prefix_tokens
  )
  return hidden_PxD.astype(jnp.float32)


def _with_odds(
  spec: StepSpec, params: Params, prompts: Prompts, answers: KnownAnswers
) -> jax.Array:
  model, dtype, (answer_PxT, length_P) = spec.model.config, spec.model.dtype, answers
  number_1xT = jnp.arange(answer_PxT.shape[1])[None]
  hidden_PxTxD = shared_prompt_forward.states(
    model,
    params,
    _answered(prompts, answers),
    prompts.length_P[:, None] - 1 + number_1xT,
    dtype,
    spec.layout.prefix_tokens,
  )
  logp_PxT, _ = logprob.token_logp(
    model,
    params,
    hidden_PxTxD,
    answer_PxT,
    temperature=spec.rollout.decode.temperature,
    chunk_tokens=spec.model.head_chunk_tokens,
    dtype=dtype,
  )
  # A probability of 1 would have infinite odds.
  logp_P = jnp.minimum(jnp.where(number_1xT < length_P[:, None], logp_PxT, 0).sum(1), _SURE)
  odds_P = jnp.where(length_P > 0, logp_P - jnp.log(-jnp.expm1(logp_P)), jnp.nan)
  return jnp.concatenate([hidden_PxTxD[:, 0].astype(jnp.float32), odds_P[:, None]], axis=1)


def _answered(prompts: Prompts, answers: KnownAnswers) -> Prompts:
  """Rows of each prompt and, behind its last token, the answer."""
  answer_PxT, length_P = answers
  at_PxL = jnp.arange(prompts.tokens_PxL.shape[1])[None] - prompts.length_P[:, None]
  behind_PxL = jnp.clip(at_PxL, 0, answer_PxT.shape[1] - 1)
  answer_PxL = jnp.take_along_axis(answer_PxT, behind_PxL, axis=1)
  tokens_PxL = jnp.where(at_PxL < 0, prompts.tokens_PxL, answer_PxL)
  return prompts._replace(tokens_PxL=tokens_PxL, length_P=prompts.length_P + length_P)


def decode_weights(spec: StepSpec, state: TrainState) -> Params:
  """The weights as decoding reads them: joined with the adapter, rounded, and sharded for decoding."""
  params = state.params
  if state.base is not None and spec.model.lora is not None:
    params = lora.for_sampling(state.base, params, spec.model.lora, spec.model.dtype)
  params = linear.for_decoding(params, spec.model.weights_dtype, spec.model.dtype)
  return jax.lax.with_sharding_constraint(
    params, sharding.decode_layout(params, spec.layout.mesh, spec.layout.rules)
  )


def _decode(
  spec: StepSpec, inputs: DecodeInputs, head: Params
) -> tuple[Rollout, jax.Array, CarriedKV | None, Metrics]:
  """One shard's rows, its decode iterations, its carried cache, and counts that add up over shards."""
  shards, model = sharding.rows_shards(spec.layout.mesh), spec.model.config
  settings = spec.rollout.decode._replace(
    slots=spec.rollout.decode.slots // shards,
    lockstep=sharding.ROWS if spec.rollout.lockstep and shards > 1 else (),
  )
  counts, new_cache, begun = {}, None, inputs.continued
  begun_tokens = 0 if begun is None else begun.length_B.sum()
  if spec.rollout.length_head is not None:
    predict = functools.partial(spec.rollout.length_head.remaining_tokens, head)
    inputs = inputs._replace(predict_tokens=predict)
  if spec.rollout.pruning is not None:
    rollout, iterations, tokens = pruned_decode.generate(
      model, settings, inputs, head, spec.rollout.pruning
    )
    return rollout, iterations, None, dict(tokens=tokens)
  if spec.rollout.tree is not None:
    share = spec.rollout.tree.share(inputs.prompts.born_P)
    rollout, iterations, tree = tree_decode.generate(
      model, settings, inputs, spec.rollout.tree, share=share
    )
    counts = {f'tree_{k}': v for k, v in tree_decode.counts(tree).items()}
  elif spec.rollout.drafts.ngram is not None:
    rollout, iterations, drafts = ngram_drafts.generate(
      model, settings, inputs, spec.rollout.drafts.ngram
    )
    counts = {f'ngram_{k}': v for k, v in drafts._asdict().items()}
  elif spec.rollout.drafts.head is not None:
    rollout, iterations, drafts = _decode_with_head(
      model, settings, inputs, spec.rollout.drafts.head, head
    )
    counts = {f'draft_head_{k}': v for k, v in drafts._asdict().items()}
  elif inputs.carried is not None:
    rollout, iterations, new_cache = ring_decode.resume(model, settings, inputs)
    counts = dict(carried_tokens=inputs.carried.cached_B.sum())
  else:
    rollout, iterations = ring_decode.generate(model, settings, inputs)
  return rollout, iterations, new_cache, counts | dict(tokens=rollout.length_B.sum() - begun_tokens)


def _decode_with_head(
  model: ModelConfig,
  settings: DecodeSettings,
  inputs: DecodeInputs,
  head: DraftHead,
  state: DraftHeadState,
) -> tuple[Rollout, jax.Array, draft_decode.DraftCounts]:
  """With drafts while they are expected to save time; both loops are compiled, and sample the same tokens."""
  drafted = lambda: draft_decode.generate(model, settings, inputs, head.drafter(state))  # noqa: E731
  plain = lambda: (*ring_decode.generate(model, settings, inputs), draft_decode.no_drafts())  # noqa: E731
  return jax.lax.cond(head.proposes(state), drafted, plain)


def _noise_steps(prompts: Prompts, rollout: Rollout, begun: Rollout | None) -> jax.Array:
  """The step whose noise drew each token [B, T]: that of the row's prompt, or the recorded one of begun tokens."""
  G = len(rollout.length_B) // len(prompts.born_P)
  column_BxT = jnp.arange(rollout.tokens_BxT.shape[1])[None]
  noise_BxT = jnp.broadcast_to(jnp.repeat(prompts.born_P, G)[:, None], rollout.tokens_BxT.shape)
  if begun is not None and begun.noise_BxT is not None:
    noise_BxT = jnp.where(column_BxT < begun.length_B[:, None], begun.noise_BxT, noise_BxT)
  return jnp.where(column_BxT < rollout.length_B[:, None], noise_BxT, 0)
