"""The StepSpec of a config: picks functions by name, computes sizes, and checks them against the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jaxrl_llm import objective, rewards
from jaxrl_llm.config import compatibility
from jaxrl_llm.config.schema import Config, typed
from jaxrl_llm.config.stages import pick
from jaxrl_llm.distributed import sharding, slices
from jaxrl_llm.learner import (
  attention_kernels,
  device_memory,
  inner_steps,
  lora,
  packing,
  precision,
)
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.packing import PackingSpec
from jaxrl_llm.learner.rollout_from_config import on_cpu, rollout_spec
from jaxrl_llm.learner.step_spec import (
  LayoutSpec,
  ModelSpec,
  ObjectiveSpec,
  RowTokens,
  StepSpec,
  UpdateSpec,
)
from jaxrl_llm.models import cudnn_attention, exact, positions
from jaxrl_llm.objective import (
  activation_noise,
  contracts,
  divergence,
  entropy_bonus,
  reference,
  score_centering,
)
from jaxrl_llm.objective.method_spec import Method
from jaxrl_llm.replay import dynamic_sampling, reuse
from jaxrl_llm.types import JsonObject, ModelConfig, UserError

# Tokens of a microbatch on a device: enough that products are as fast as they become, and few enough that rounding up
# to whole microbatches costs little.
_TOKENS, _CPU_TOKENS = 8192, 256
# Tokens of a bin where rows are short, and where a group is: attention costs by the bin, a split group a second prompt.
_SHORT_BIN, _CPU_SHORT_BIN, _WHOLE_GROUP = 256, 192, 512
_BIN_ROWS = 64  # of a bin, at most where groups are smaller, so that arrays by row stay small
# Hints that number what they do to a prompt.
_WITH_CONTEXTS = ('contexts', 'stages', 'rewritten', 'reflected', 'written')


def check_objective(config: Config) -> None:
  """Raises UserError for an objective that cannot be composed; it loads nothing."""
  method = objective.method(config.objective)
  contracts.check(config.objective, {'outer': inner_steps}, config.optimizer)
  compatibility.check(config, _facts(config, method))


def _facts(config: Config, method: Method) -> JsonObject:
  """Facts for `compatibility` that the config does not state: inputs of the chosen functions."""
  batched = next((kind for kind in rewards.batch_modes(config.rewards) if kind), '')
  return {'objective.needs': tuple(sorted(method.needs)), 'rewards.batched': batched}


def _model_facts(
  mesh: jax.sharding.Mesh, model: ModelConfig, teacher: ModelConfig | None
) -> JsonObject:
  """Facts for `compatibility` of the policy, its teacher, and the devices."""
  facts = {f'mesh.{axis}': mesh.shape[axis] for axis in sharding.AXES[2:]}
  models = [model] if teacher is None else [model, teacher]
  of_model = {name: getattr(model, name) for name in ('experts', 'latent')}
  of_model |= dict(
    sinks=any(m.sinks for m in models), attention_cap=max(m.attention_cap for m in models)
  )
  of_model['inexact'] = exact.inexact_parts(model)
  of_models = dict(
    window=max(m.window for m in models),
    chunked=any(m.chunked for m in models),
    recurrent=any(m.is_recurrent for m in models),
  )
  return facts | {f'model.{name}': value for name, value in (of_model | of_models).items()}


def check_rows(config: Config, mesh: jax.sharding.Mesh) -> None:
  """Raises UserError where the prompts of a minibatch cannot be divided over the devices."""
  store, minibatches = (
    pick(reuse, config.replay.reuse, 'replay.reuse')(),
    config.learner.minibatches,
  )
  replayed = store.slots(config.prompts) if store else 0
  for axes in (sharding.ROWS, sharding.UPDATE_ROWS):
    shards, product = sharding.rows_shards(mesh, axes), ' × '.join(axes)
    if config.prompts // minibatches % shards:
      raise UserError(
        f'config.prompts={config.prompts} (over learner.minibatches={minibatches}) is '
        f'not a multiple of {product} = {shards} devices; change one of them.'
      )
    if replayed % (minibatches * shards):
      raise UserError(
        f'config.replay.reuse.share={config.replay.reuse.get("share")} replays {replayed} groups beside '
        f'config.prompts={config.prompts} sampled ones, which is not a multiple of learner.minibatches × {product} = '
        f'{minibatches * shards}; change one of them.'
      )


def make_spec(
  config: Config,
  model: ModelConfig,
  end_ids: tuple[int, ...],
  mesh: jax.sharding.Mesh,
  token_texts: Callable[[], list[str]] | None = None,
  teacher: ModelConfig | None = None,
) -> StepSpec:
  """Reads a validated config for a model that stops at any of `end_ids`.

  `token_texts` returns the text of each token, for rules that search for one; `teacher` is the shape of the model
  that config.objective.teacher names. Raises UserError for unknown functions and contradictory settings.
  """
  config = typed(config)
  model = positions.for_context(model, config.longest_prompt_tokens + config.completion_tokens)
  dtype = precision.compute_dtype(config, on_cpu(mesh))
  model = dataclasses.replace(model, is_exact=precision.is_exact(config, dtype, on_cpu(mesh)))
  method = objective.method(config.objective)._replace(weight_K=rewards.weights(config.rewards))
  facts = _facts(config, method) | _model_facts(mesh, model, teacher)
  config = attention_kernels.choose(config, model, mesh, facts)
  compatibility.check(config, facts)
  _check_mesh(config, model, mesh)
  store = pick(reuse, config.replay.reuse, 'replay.reuse')()
  group = config.rollouts + (store.rows if store else 0)
  slots = config.prompts + (store.slots(config.prompts) if store else 0)
  precision.check(config, dtype, method.needs_old)
  rule = pick(dynamic_sampling, config.replay.collect, 'replay.collect')()
  model_spec = ModelSpec(
    config=model,
    lora=lora.settings(config.lora, model),
    teacher=teacher,
    dtype=dtype,
    weights_dtype=precision.sampling_dtype(config, dtype),
    head_chunk_tokens=config.objective.head_chunk_tokens,
  )
  spec = StepSpec(
    model=model_spec,
    rollout=rollout_spec(config, model_spec, tuple(end_ids), token_texts, mesh)._replace(
      greedy_first=method.needs_greedy
    ),
    update=_update(config, model_spec, mesh, (slots, group), skips_empty=rule is not None),
    objective=_objective(config, method),
    layout=LayoutSpec(
      mesh=mesh,
      rules=sharding.rules(config.mesh.get('rules', ())),
      prompts=config.prompts,
      replayed=slots - config.prompts,
      imitates=config.replay.reuse.fn == 'self_imitation',
      unrecorded=config.replay.reuse.fn in ('shared', 'cached'),
      prompt_tokens=config.prompt_tokens,
      group=group,
      slots_per_prompt=_slots_per_prompt(config, rule),
      contexts=config.curriculum.hint.fn in _WITH_CONTEXTS,
      hints=config.curriculum.hint.fn != 'none',
      slices=slices.count(mesh.devices.flatten().tolist(), config.mesh.slices),
    ),
    seed=config.seed,
  )
  train_state.check_base(spec)
  return device_memory.with_slots_that_fit(spec)


def _update(
  config: Config,
  model: ModelSpec,
  mesh: jax.sharding.Mesh,
  batch: tuple[int, int],
  *,
  skips_empty: bool,
) -> UpdateSpec:
  learner, remat = config.learner, config.learner.remat
  loop = pick(inner_steps, config.optimizer.outer, 'optimizer.outer')()
  steps_per_minibatch = loop.max_steps(config.environment.turns) if loop else 1
  steps = config.steps * learner.minibatches * learner.passes * steps_per_minibatch
  optimizer, schedule = make_optimizer(config.optimizer, steps, seed=config.seed)
  noise = pick(activation_noise, config.objective.activation_noise, 'objective.activation_noise')()
  return UpdateSpec(
    optimizer=optimizer,
    schedule=schedule,
    inner_steps=loop,
    activation_noise=noise,
    minibatches=learner.minibatches,
    passes=learner.passes,
    packing=_packing(config, model, mesh, batch),
    remat=remat if isinstance(remat, bool) else not on_cpu(mesh),
    attention=attention_kernels.of_update(config, mesh),
    quantize=learner.quantize,
    skips_empty=skips_empty,
  )


def microbatch_tokens(config: Config, mesh: jax.sharding.Mesh) -> int:
  """Tokens of one gradient-accumulation pass on a device."""
  return config.learner.microbatch_tokens or (_CPU_TOKENS if on_cpu(mesh) else _TOKENS)


def _packing(
  config: Config, model: ModelSpec, mesh: jax.sharding.Mesh, batch: tuple[int, int]
) -> PackingSpec:
  """Bins for the longest row, or a whole group where that is short; as many as the microbatch has room for.

  `batch`: slots of a batch, and rows of a slot.
  """
  L, T, (slots, group) = config.prompt_tokens, config.completion_tokens, batch
  align = exact.ALIGNMENT if model.config.is_exact else 1
  L, read = (packing.aligned(align, tokens) for tokens in (L, T - 1))
  longest, whole = L + read, L + group * (read + 1)
  shards = sharding.rows_shards(mesh, sharding.UPDATE_ROWS)
  prompts = slots // config.learner.minibatches // shards
  rows = prompts * group
  short = _CPU_SHORT_BIN if on_cpu(mesh) else _SHORT_BIN
  bin_tokens = max(longest, min(max(whole, short), _WHOLE_GROUP, prompts * whole))
  if config.learner.attention == 'cudnn':
    bin_tokens = packing.aligned(cudnn_attention.ALIGNMENT, bin_tokens)
  most = -(-rows * longest // bin_tokens)  # bins that hold every row beside a prompt of its own
  recurrent = any(m.is_recurrent for m in (model.config, model.teacher) if m is not None)
  tokens = microbatch_tokens(config, mesh)
  if model.config.is_exact and bin_tokens > exact.MOST_COLUMNS:
    raise UserError(
      f'config.prompt_tokens={config.prompt_tokens} and config.completion_tokens={T} need {bin_tokens} columns, and '
      f'with more than {exact.MOST_COLUMNS} a sum depends on where its keys lie; lower them, or set '
      '--config.learner.agreement=off.'
    )
  return PackingSpec(
    bins=min(max(1, tokens // bin_tokens), most),
    tokens=bin_tokens,
    # Where all rows have all their tokens, completions take this share of a bin; a little more is room for others.
    predicted=max(T, -(-bin_tokens * group * T * 9 // (whole * 8))),
    rows=min(rows, max(group, _BIN_ROWS)),
    # A state goes on from one prompt to one completion.
    shares_prompt=config.learner.attention != 'splash' and not recurrent,
    align=align,
  )


def _objective(config: Config, method: Method) -> ObjectiveSpec:
  auxiliary, optimizer = method.auxiliary_model, None
  if auxiliary is not None:
    steps = config.steps * config.learner.minibatches
    optimizer, _ = make_optimizer(config.optimizer, steps, auxiliary.learning_rate, config.seed)
  stages, sizes = config.objective, None
  refresh = pick(reference, stages.reference, 'objective.reference')()
  if refresh is not None and not method.needs_reference:
    raise UserError(
      f'config.objective.reference.fn={stages.reference.fn!r} has no use: no stage reads a reference model; set '
      '--config.objective.kl.fn=k3 or --config.objective.reward_kl.fn=k1, or --config.objective.reference.fn=frozen.'
    )
  if method.needs_spans:
    teaching = stages.distillation
    sizes = RowTokens(teaching['teacher_prompt_tokens'], teaching['teacher_completion_tokens'])
  return ObjectiveSpec(
    method=method,
    auxiliary_optimizer=optimizer,
    average_decay=stages.old_policy.get('decay') if method.needs_average else None,
    entropy_bonus=pick(entropy_bonus, stages.entropy_bonus, 'objective.entropy_bonus')(),
    refresh=refresh,
    divergence=pick(divergence, stages.divergence, 'objective.divergence')(),
    score_centering=pick(score_centering, stages.score_centering, 'objective.score_centering')(),
    solution_tokens=stages.distillation.get('prompt_tokens', 0),
    teacher_tokens=sizes,
  )


def _check_mesh(config: Config, model: ModelConfig, mesh: jax.sharding.Mesh) -> None:
  """Raises UserError for a mesh that slots, experts or recurrent heads cannot be cut over."""
  slots, shards = config.rollout.slots, sharding.rows_shards(mesh)
  if slots % shards or slots > config.prompts * config.rollouts:
    raise UserError(
      f'config.rollout.slots={slots} must be a multiple of data × fsdp × context × expert = {shards} devices and at '
      f'most prompts × rollouts = {config.prompts * config.rollouts}; 0 stands for all of them.'
    )
  if mesh.shape['expert'] > 1 and (model.experts or 1) % mesh.shape['expert']:
    raise UserError(
      f'config.mesh.expert={mesh.shape["expert"]} does not divide the {model.experts} experts of the model; set it '
      'to a divisor, or to 1 for a model without experts.'
    )
  heads, parts = model.delta_key_heads, sharding.rows_shards(mesh, sharding.SAMPLED_FEATURES)
  if model.is_recurrent and heads % parts:
    raise UserError(
      f'config.mesh.tensor × decode = {parts} devices do not divide the {heads} key heads of the '
      "model's recurrent layers, whose states they shard; set it to a divisor."
    )


def _slots_per_prompt(config: Config, rule: dynamic_sampling.Rule | None) -> int:
  """Most slots of a prompt: over several steps by `replay.collect`, in one by `curriculum.slots_per_prompt`."""
  average = config.curriculum.slots_per_prompt
  if average > config.prompts:
    raise UserError(
      f'config.curriculum.slots_per_prompt={average} slots a prompt are more than '
      f'config.prompts={config.prompts} slots; lower it.'
    )
  if average > 1:
    return config.prompts - config.prompts // average + 1  # every other prompt has at least one
  if rule is None or rule.most == 1:
    return 1
  if rule.top_ups >= config.prompts:
    raise UserError(
      f'config.replay.collect.top_ups={rule.top_ups} leaves no slot for new prompts; it must be below '
      f'config.prompts={config.prompts}.'
    )
  return rule.most
