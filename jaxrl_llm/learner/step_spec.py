"""StepSpec: all settings that are fixed when the step is compiled, read from a validated config."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective, rewards
from jaxrl_llm.config import compatibility
from jaxrl_llm.config.schema import Config, typed
from jaxrl_llm.config.stages import pick
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import inner_steps, lora, precision
from jaxrl_llm.learner.inner_steps import LastTurnFirst, SlowFast
from jaxrl_llm.learner.lora import LoraSettings
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.models import splash
from jaxrl_llm.objective import activation_noise, contracts
from jaxrl_llm.objective.activation_noise import Layers
from jaxrl_llm.objective.policy_gradient import Method
from jaxrl_llm.replay import dynamic_sampling, successes
from jaxrl_llm.rollout import (
  draft_verification,
  early_exit,
  pruning,
  queue_order,
  stopping,
  text_automaton,
  tree_rules,
)
from jaxrl_llm.rollout.ngram_drafts import NgramSettings
from jaxrl_llm.rollout.pruning import PruningSettings
from jaxrl_llm.rollout.sampling import NO_FILTER, TokenFilter
from jaxrl_llm.rollout.slot_loop import DecodeSettings
from jaxrl_llm.rollout.tree_rules import TreeRules
from jaxrl_llm.types import ModelConfig, UserError


class ModelSpec(NamedTuple):
  """The models of a step and the number types that they compute in."""

  config: ModelConfig  # of the policy
  lora: LoraSettings | None  # None: the weights themselves are trained
  teacher: ModelConfig | None  # None: no distillation
  dtype: str  # of matrix products, in the update and while sampling
  weights_dtype: str  # of kernels while sampling
  head_chunk_tokens: int  # rows of logits that exist at once on a device


class DraftSpec(NamedTuple):
  """Draft tokens, and the rule that accepts them."""

  verify: Callable | None  # accepts tokens of earlier completions; None: no such drafts
  records_noise: bool  # rollouts record the step whose noise drew each token, which `coupled` reads
  ngram: NgramSettings | None  # drafts from the group's own completions


class RolloutSpec(NamedTuple):
  """How completions are sampled."""

  decode: DecodeSettings
  drafts: DraftSpec
  pruning: PruningSettings | None  # None: every rollout that begins is finished
  features: int  # F, of the correctness head; 0 without pruning
  tree: TreeRules | None  # when rollouts fork; None: they are independent
  carried_calls: int  # calls whose unfinished rows keep their cache; 0: such rows are encoded again
  lockstep: bool  # all shards of rows run equally many decode iterations
  multi_turn: bool  # rollouts hold turns and the observations between them
  continues: bool  # rollouts may be left unfinished, and are continued in a later step
  exit_memory: bool  # rollouts record the memory of the early-exit rule for that later step


class Microbatch(NamedTuple):
  """The shape of one gradient-accumulation pass."""

  prompts: int
  rollouts: int  # rows of each prompt; fewer than the group repeats the prompt


class UpdateSpec(NamedTuple):
  """How the update is computed."""

  optimizer: optax.GradientTransformation
  schedule: Callable  # optimizer step → learning rate
  inner_steps: SlowFast | LastTurnFirst | None  # None: one step a minibatch
  activation_noise: Layers | None  # in the forward pass
  minibatches: int  # per batch
  microbatch: Microbatch
  remat: bool  # recompute layer activations in the backward pass
  attention: Callable | None  # a kernel; None: XLA's attention
  quantize: bool  # kernels are rounded as while sampling
  skips_empty: bool  # batches may be empty, and an empty batch skips the update


class ObjectiveSpec(NamedTuple):
  """The loss, and what belongs to it besides."""

  method: Method
  auxiliary_optimizer: optax.GradientTransformation | None  # None: no auxiliary model
  average_decay: float | None  # of the weights averaged for the old policy; None: no average


class LayoutSpec(NamedTuple):
  """Devices, sharding, and the sizes of a batch."""

  mesh: jax.sharding.Mesh
  rules: tuple  # (regular expression over a parameter's path, mesh axes), the first match counts
  prompts: int  # P
  prompt_tokens: int  # L
  group: int  # rows of a slot in the update: sampled and replayed
  slots_per_prompt: int  # at most; rows of all slots of a prompt form one group
  contexts: bool  # prompts record which strategy they include
  hints: bool  # prompts record the share of a known answer that they include


class StepSpec(NamedTuple):
  """All settings that are fixed when the step is compiled."""

  model: ModelSpec
  rollout: RolloutSpec
  update: UpdateSpec
  objective: ObjectiveSpec
  layout: LayoutSpec
  seed: int


def teacher_spec(spec: StepSpec) -> StepSpec:
  """The teacher's forward pass: its own shape, and kernels that are not rounded."""
  if spec.model.teacher is None:
    raise ValueError('the method has no teacher')
  return spec._replace(
    model=spec.model._replace(config=spec.model.teacher),
    update=spec.update._replace(quantize=False),
  )


def demonstration_spec(spec: StepSpec, prompts: int) -> StepSpec:
  """Passes over `prompts` demonstrations, one row a prompt, in microbatches no larger than those of the rollouts."""
  size = math.gcd(spec.update.microbatch.prompts, prompts)
  return spec._replace(
    update=spec.update._replace(microbatch=Microbatch(size, 1)),
    layout=spec.layout._replace(group=1),
  )


def trained_weights_spec(spec: StepSpec) -> StepSpec:
  """Sampling from weights as they are saved, which are not rounded."""
  return spec._replace(model=spec.model._replace(weights_dtype=spec.model.dtype))


def evaluation_spec(
  spec: StepSpec, samples: int, temperature: float, token_filter: TokenFilter = NO_FILTER
) -> StepSpec:
  """Sampling of `samples` complete rows a prompt from weights as they are saved.

  There is no pruning, no tree and no stop rule. An early-exit rule is kept where it ends turns of an environment.
  """
  spec = trained_weights_spec(spec)
  decode = spec.rollout.decode._replace(
    rollouts=samples,
    temperature=temperature,
    token_filter=token_filter,
    slots=0,
    stop_rule=stopping.none,
    exit_rule=spec.rollout.decode.exit_rule if spec.rollout.multi_turn else early_exit.none,
    record_experts=False,
  )
  return spec._replace(
    rollout=spec.rollout._replace(decode=decode, pruning=None, tree=None, exit_memory=False)
  )


def check_objective(config: Config) -> None:
  """Raises UserError for an objective that cannot be composed; it loads nothing."""
  method = objective.method(config.objective)
  contracts.check(config.objective, {'outer': inner_steps}, config.optimizer)
  compatibility.check(config, _facts(config, method))


def _facts(config: Config, method: Method) -> dict[str, Any]:
  """Facts for `compatibility` that the config does not state: inputs of the chosen functions."""
  batched = next((kind for kind in rewards.batch_modes(config.rewards) if kind), '')
  return {'objective.needs': tuple(sorted(method.needs)), 'rewards.batched': batched}


def _model_facts(
  mesh: jax.sharding.Mesh, model: ModelConfig, teacher: ModelConfig | None
) -> dict[str, Any]:
  """Facts for `compatibility` of the policy, its teacher, and the devices."""
  facts = {f'mesh.{axis}': size for axis, size in mesh.shape.items()}
  window = max(model.window, teacher.window if teacher else 0)
  return facts | {'model.experts': model.experts, 'model.window': window}


def check_rows(config: Config, mesh: jax.sharding.Mesh) -> None:
  """Raises UserError where the prompts of a minibatch cannot be divided over the devices."""
  if config.prompts // config.learner.minibatches % sharding.rows_shards(mesh):
    raise UserError(
      f'config.prompts={config.prompts} (over learner.minibatches={config.learner.minibatches}) is '
      f'not a multiple of data × fsdp × context × expert = {sharding.rows_shards(mesh)} devices; change one of them.'
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
  that config.objective.teacher names. Raises UserError for a function that does not exist, and for settings that
  contradict each other.
  """
  config = typed(config)
  dtype = precision.compute_dtype(config, _on_cpu(mesh))
  method = objective.method(config.objective)._replace(weight_K=rewards.weights(config.rewards))
  compatibility.check(config, _facts(config, method) | _model_facts(mesh, model, teacher))
  _check_mesh(config, model, mesh)
  group = config.rollouts + pick(successes, config.replay.reuse, 'replay.reuse')().count
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
  return StepSpec(
    model=model_spec,
    rollout=_rollout(config, model_spec, tuple(end_ids), token_texts),
    update=_update(config, model_spec, mesh, group, skips_empty=rule is not None),
    objective=_objective(config, method),
    layout=LayoutSpec(
      mesh=mesh,
      rules=sharding.rules(config.mesh.get('rules', ())),
      prompts=config.prompts,
      prompt_tokens=config.prompt_tokens,
      group=group,
      slots_per_prompt=_slots_per_prompt(config, rule),
      contexts=config.curriculum.hint.fn == 'contexts',
      hints=config.curriculum.hint.fn != 'none',
    ),
    seed=config.seed,
  )


def _on_cpu(mesh: jax.sharding.Mesh) -> bool:
  return mesh.devices.flat[0].platform == 'cpu'


def _rollout(
  config: Config,
  model: ModelSpec,
  end_ids: tuple[int, ...],
  token_texts: Callable[[], list[str]] | None,
) -> RolloutSpec:
  pruning_settings, multi_turn = _pruning(config), config.environment.fn != 'none'
  decode = _decode(config, model, end_ids, token_texts)
  return RolloutSpec(
    decode=decode,
    drafts=_drafts(config),
    pruning=pruning_settings,
    features=model.config.width if pruning_settings else 0,
    tree=_tree(config),
    # With mode='lag' the host continues the rows of the call before the last one.
    carried_calls=config.rollout.carry_cache * (2 if config.mode == 'lag' else 1),
    lockstep=config.rollout.lockstep,
    multi_turn=multi_turn,
    continues=multi_turn or config.rollout.stop.fn != 'none',
    # Each turn of an environment begins with an empty memory.
    exit_memory=decode.exit_rule is not early_exit.none and not multi_turn,
  )


def _decode(
  config: Config,
  model: ModelSpec,
  end_ids: tuple[int, ...],
  token_texts: Callable[[], list[str]] | None,
) -> DecodeSettings:
  settings = config.rollout
  return DecodeSettings(
    rollouts=config.rollouts,
    max_tokens=config.completion_tokens,
    temperature=config.temperature,
    end_ids=end_ids,
    dtype=model.dtype,
    slots=settings.slots,
    queue_order=pick(queue_order, settings.queue_order, 'rollout.queue_order'),
    stop_rule=pick(stopping, settings.stop, 'rollout.stop'),
    exit_rule=_exit_rule(config, model.config.vocab, token_texts),
    cache_dtype=model.dtype if settings.cache_dtype == 'auto' else settings.cache_dtype,
    windows=settings.windows,
    test_every=settings.test_every,
    record_experts=config.learner.replay_experts,
  )


def _drafts(config: Config) -> DraftSpec:
  verify, ngram = config.rollout.draft, config.rollout.ngram
  rule = pick(draft_verification, verify, 'rollout.draft')
  return DraftSpec(
    verify=None if verify.fn == 'none' else rule,
    records_noise=verify.fn == 'coupled',
    ngram=NgramSettings(**ngram) if ngram.draft else None,
  )


def _exit_rule(
  config: Config, vocab: int, token_texts: Callable[[], list[str]] | None
) -> Callable[..., Any]:
  """The early-exit rule; a rule that searches for a text gets the automaton's table."""
  settings = config.rollout.early_exit
  rule = pick(early_exit, settings, 'rollout.early_exit')
  if settings.fn == 'none':
    return early_exit.none
  text = settings.get('text')
  if text is None:
    return rule
  if not text or token_texts is None:
    raise UserError(
      f'config.rollout.early_exit.text={text!r} must not be empty, and needs a tokenizer that tells its texts.'
    )
  texts = token_texts()
  texts += [''] * (vocab - len(texts))  # some models have more embeddings than tokens
  return functools.partial(rule, table=jnp.asarray(text_automaton.build_table(texts, text)))


def _update(
  config: Config, model: ModelSpec, mesh: jax.sharding.Mesh, group: int, *, skips_empty: bool
) -> UpdateSpec:
  learner, remat = config.learner, config.learner.remat
  loop = pick(inner_steps, config.optimizer.outer, 'optimizer.outer')()
  steps_per_minibatch = loop.max_steps(config.environment.turns) if loop else 1
  optimizer, schedule = make_optimizer(
    config.optimizer, config.steps * learner.minibatches * steps_per_minibatch
  )
  noise = pick(activation_noise, config.objective.activation_noise, 'objective.activation_noise')()
  return UpdateSpec(
    optimizer=optimizer,
    schedule=schedule,
    inner_steps=loop,
    activation_noise=noise,
    minibatches=learner.minibatches,
    microbatch=_microbatch(config, mesh, group),
    remat=remat if isinstance(remat, bool) else not _on_cpu(mesh),
    attention=_kernel(config, mesh),
    quantize=learner.quantize,
    skips_empty=skips_empty,
  )


def _microbatch(config: Config, mesh: jax.sharding.Mesh, group: int) -> Microbatch:
  """At most config.learner.microbatch_rollouts rows, and as many rows of a prompt as its devices allow."""
  rows = config.prompts * group // config.learner.minibatches
  rows = min(rows, config.learner.microbatch_rollouts or rows)
  rollouts = min(group, max(1, rows // sharding.rows_shards(mesh, sharding.UPDATE_ROWS)))
  return Microbatch(rows // rollouts, rollouts)


def _objective(config: Config, method: objective.Method) -> ObjectiveSpec:
  auxiliary, optimizer = method.auxiliary_model, None
  if auxiliary is not None:
    steps = config.steps * config.learner.minibatches
    optimizer, _ = make_optimizer(config.optimizer, steps, auxiliary.learning_rate)
  decay = config.objective.old_policy.get('decay') if method.needs_average else None
  return ObjectiveSpec(method=method, auxiliary_optimizer=optimizer, average_decay=decay)


def _check_mesh(config: Config, model: ModelConfig, mesh: jax.sharding.Mesh) -> None:
  """Raises UserError for a mesh that slots or experts cannot be cut over."""
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


def _kernel(config: Config, mesh: jax.sharding.Mesh) -> Callable | None:
  """The kernel of the update's attention. Raises UserError for one that these devices cannot run."""
  name, platform = config.learner.attention, mesh.devices.flat[0].platform
  flag = f'config.learner.attention={name!r}'
  if name == 'xla':
    return None
  if name != 'splash':
    raise UserError(f'{flag} is unknown; choose one of: xla, splash.')
  if platform not in ('tpu', 'cpu'):
    raise UserError(f"{flag} is a kernel for TPUs, and this is a {platform}; set it to 'xla'.")
  return functools.partial(splash.attend, interpret=platform == 'cpu')


def _slots_per_prompt(config: Config, rule: dynamic_sampling.Rule | None) -> int:
  """Most slots of a prompt: over several steps by `replay.collect`, in one by `curriculum.slots_per_prompt`."""
  average = config.curriculum.slots_per_prompt
  if average > config.prompts:
    raise UserError(
      f'config.curriculum.slots_per_prompt={average} slots a prompt are more than config.prompts={config.prompts} slots; lower it.'
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


def _pruning(config: Any) -> PruningSettings | None:
  made = pick(pruning, config.rollout.pruning, 'rollout.pruning')()
  if made is None:
    return None
  if made.candidates <= config.rollouts:
    raise UserError(
      f'config.rollout.pruning.candidates={made.candidates} must be more than config.rollouts='
      f'{config.rollouts}, the rollouts that survive.'
    )
  if made.floor * made.candidates > config.rollouts:
    raise UserError(
      f'config.rollout.pruning.floor={made.floor} promises more survivors than there are: {made.candidates} candidates '
      f'keep at least {made.floor * made.candidates:g} of config.rollouts={config.rollouts}; set floor to at most '
      f'{config.rollouts / made.candidates:g}, or lower candidates.'
    )
  if not 1 <= made.at_tokens < config.completion_tokens:
    raise UserError(
      f'config.rollout.pruning.at_tokens={made.at_tokens} must lie between 1 and config.completion_tokens - 1 = '
      f'{config.completion_tokens - 1}.'
    )
  return made


def _tree(config: Config) -> TreeRules | None:
  """The rules of `config.rollout.tree`, which needs a slot for every row."""
  settings = config.rollout
  rules = pick(tree_rules, settings.tree, 'rollout.tree')()
  if rules is not None and settings.slots not in (0, config.prompts * config.rollouts):
    raise UserError(
      f'config.rollout.tree.fn={settings.tree.fn!r} needs a slot for every row: set '
      f'config.rollout.slots={settings.slots} to 0.'
    )
  return rules
