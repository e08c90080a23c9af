"""What is fixed when a step is compiled, read from a validated config."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective, rewards
from jaxrl_llm.config import compatibility
from jaxrl_llm.config.stages import pick
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import inner_steps, lora, precision
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.models import splash
from jaxrl_llm.objective import activation_noise, contracts
from jaxrl_llm.replay import dynamic_sampling, successes
from jaxrl_llm.rollout import (
  draft_verification,
  early_exit,
  ngram_drafts,
  pruning,
  queue_order,
  ring_decode,
  stopping,
  text_automaton,
  tree_rules,
)
from jaxrl_llm.types import ModelConfig, UserError


class Program(NamedTuple):
  """What is fixed when a step is compiled."""

  model: ModelConfig
  lora: lora.Settings | None  # an adapter is trained; None: the weights
  mesh: jax.sharding.Mesh
  rules: tuple  # which axes of the mesh a parameter is cut over, by its path: shard.RULES and what the config adds
  method: objective.Method
  optimizer: optax.GradientTransformation
  schedule: Callable
  auxiliary_optimizer: optax.GradientTransformation | None  # None: there is no auxiliary model
  outer: (
    inner_steps.SlowFast | inner_steps.LastTurnFirst | None
  )  # a loop around the optimizer's steps; None: one step a minibatch
  perturb: activation_noise.Layers | None  # noise in the update's forward pass
  generate: ring_decode.DecodeSettings
  weights_dtype: str  # of the kernels that are sampled with
  quantize_update: bool  # the update's passes read kernels rounded likewise
  prune: pruning.PruningSettings | None  # None: all rollouts that begin are finished
  ngram: ngram_drafts.NgramSettings | None  # drafts from the group's text; None: no drafts
  verify: Callable | None  # which tokens of a draft stay; None: there are no drafts
  tree: tree_rules.TreeRules | None  # when rollouts fork; None: each is a sample of its own
  carried: int  # calls whose unfinished rows' keys and values are kept; 0: these are encoded again
  lockstep: bool  # all shards of rows run the decode loop equally often
  keeps_noise: bool  # rollouts record whose noise drew each token: drafts are verified with it
  seed: int
  features: int  # F: what a row is judged by while it is sampled
  teacher: ModelConfig | None  # the shape of another model; None: there is none
  prompts: int  # P
  group: int  # rows of a slot that an update sees: those sampled, and those replayed
  parts: int  # most slots that one prompt fills; its rows are one group
  contexts: bool  # prompts say which strategy they were given
  hints: bool  # prompts say how much of an answer they were told
  answered: bool  # rollouts say which of their tokens an environment gave
  idles: bool  # batches may be empty for a while, and cost nothing then
  prompt_tokens: int  # L
  minibatches: int  # optimizer steps per batch
  slice_groups: int  # prompts per gradient-accumulation slice
  slice_rollouts: int  # rows of each of them; fewer than G repeats the prompt
  head_chunk_tokens: int
  remat: bool
  attend: Callable | None  # a kernel for the update's attention; None: XLA's


def check_objective(config: Any) -> None:
  """Raises UserError for an objective that cannot be composed; reads nothing, so it comes before what loads."""
  objective.method(config.objective)
  contracts.check(config.objective, {'outer': inner_steps}, config.optimizer)


def check_rows(config: Any, mesh: jax.sharding.Mesh) -> None:
  """Raises UserError where the prompts of a minibatch cannot be cut over the mesh. Source: none."""
  if config.prompts // config.learner.minibatches % sharding.rows_shards(mesh):
    raise UserError(
      f'config.prompts={config.prompts} (over learner.minibatches={config.learner.minibatches}) is '
      f'not a multiple of data × fsdp × context × expert = {sharding.rows_shards(mesh)} devices; change one of them.'
    )


def make_program(
  config: Any,
  model: ModelConfig,
  end_ids: tuple[int, ...],
  mesh: jax.sharding.Mesh,
  token_texts: Callable[[], list[str]] | None = None,
  teacher: ModelConfig | None = None,
) -> Program:
  """Reads a validated config. `token_texts` gives each token's text to the rules that look for one, `teacher` is the
  shape of the model that config.objective.teacher names.

  Raises UserError for a function that does not exist, or for settings that contradict each other.
  Source: none.
  """
  cpu = mesh.devices.flat[0].platform == 'cpu'
  dtype = precision.compute(config, cpu)
  group = config.rollouts + _replays(config)
  rows = config.prompts * group // config.learner.minibatches
  rows = min(rows, config.learner.microbatch_rollouts or rows)
  slice_rollouts = min(group, max(1, rows // sharding.rows_shards(mesh, sharding.UPDATE_ROWS)))
  slots, shards = config.rollout.slots, sharding.rows_shards(mesh)
  compatibility.generation(config.rollout)
  compatibility.experts(config, model)
  pruning = _pruning(config)
  if slots % shards or slots > config.prompts * config.rollouts:
    raise UserError(
      f'config.rollout.slots={slots} must be a multiple of data × fsdp × context × expert = {shards} devices and at '
      f'most prompts × rollouts = {config.prompts * config.rollouts}; 0 stands for all of them.'
    )
  for axis in ('expert', 'tensor'):
    if not config.rollout.lockstep and mesh.shape[axis] > 1:
      raise UserError(
        f'config.rollout.lockstep=False needs config.mesh.{axis}=1, not {mesh.shape[axis]}: shards of '
        f'rows that end apart wait for each other in the sums over {axis} for ever.'
      )
  if mesh.shape['expert'] > 1 and (model.experts or 1) % mesh.shape['expert']:
    raise UserError(
      f'config.mesh.expert={mesh.shape["expert"]} does not divide the {model.experts} experts of the model; set it '
      'to a divisor, or to 1 for a model without experts.'
    )
  draft = pick(draft_verification, config.rollout.draft, 'rollout.draft')
  cache_dtype = config.rollout.cache_dtype
  loop = pick(inner_steps, config.optimizer.outer, 'optimizer.outer')()
  most = loop.most(config.environment.turns) if loop else 1
  optimizer_steps = config.steps * config.learner.minibatches * most
  optimizer, schedule = make_optimizer(config.optimizer, optimizer_steps)
  method = objective.method(config.objective)._replace(weight_K=rewards.weights(config.rewards))
  precision.check(config, dtype, method.needs_old)
  rule = pick(dynamic_sampling, config.replay.collect, 'replay.collect')()
  return Program(
    model=model,
    lora=lora.settings(config.lora, model),
    mesh=mesh,
    rules=sharding.rules(config.mesh.get('rules', ())),
    method=method,
    optimizer=optimizer,
    schedule=schedule,
    auxiliary_optimizer=_auxiliary_optimizer(config, method.auxiliary_model),
    outer=loop,
    perturb=pick(
      activation_noise, config.objective.activation_noise, 'objective.activation_noise'
    )(),
    generate=ring_decode.DecodeSettings(
      rollouts=config.rollouts,
      max_tokens=config.completion_tokens,
      temperature=config.temperature,
      end_ids=tuple(end_ids),
      dtype=dtype,
      slots=config.rollout.slots,
      queue_order=pick(queue_order, config.rollout.queue_order, 'rollout.queue_order'),
      stop_rule=pick(stopping, config.rollout.stop, 'rollout.stop'),
      exit_rule=_exit(config, model.vocab, token_texts),
      cache_dtype=dtype if cache_dtype == 'auto' else cache_dtype,
      windows=config.rollout.windows,
      test_every=config.rollout.test_every,
      record_experts=config.learner.replay_experts,
    ),
    weights_dtype=precision.weights(config, dtype),
    quantize_update=config.learner.quantize,
    prune=pruning,
    ngram=ngram_drafts.NgramSettings(**config.rollout.ngram) if config.rollout.ngram.draft else None,
    verify=None if config.rollout.draft.fn == 'none' else draft,
    tree=_tree(config),
    # A lagging host continues the rows of the call before the last one.
    carried=config.rollout.carry_cache * (2 if config.mode == 'lag' else 1),
    lockstep=config.rollout.lockstep,
    keeps_noise=config.rollout.draft.fn == 'coupled',
    seed=config.seed,
    features=model.width if pruning else 0,
    teacher=teacher,
    prompts=config.prompts,
    group=group,
    parts=_parts(config, method, rule),
    contexts=_contexts(config, method),
    hints=_hints(config, method),
    answered=config.environment.fn != 'none',
    idles=rule is not None,
    prompt_tokens=config.prompt_tokens,
    minibatches=config.learner.minibatches,
    slice_groups=rows // slice_rollouts,
    slice_rollouts=slice_rollouts,
    head_chunk_tokens=config.objective.head_chunk_tokens,
    remat=(not cpu) if config.learner.remat == 'auto' else config.learner.remat,
    attend=_kernel(config, mesh, model, teacher),
  )


def _kernel(config: Any, mesh: jax.sharding.Mesh, *models: ModelConfig | None) -> Callable | None:
  """What computes the update's attention. Raises UserError for a kernel that cannot."""
  asks, platform = (
    f'config.learner.attention={config.learner.attention!r}',
    mesh.devices.flat[0].platform,
  )
  if config.learner.attention == 'xla':
    return None
  if config.learner.attention != 'splash':
    raise UserError(f'{asks} is unknown; choose one of: xla, splash.')
  if platform not in ('tpu', 'cpu'):
    raise UserError(f"{asks} is a kernel for TPUs, and this is a {platform}; set it to 'xla'.")
  if mesh.shape['context'] > 1:
    raise UserError(
      f"{asks} needs a row's tokens on one device, and config.mesh.context={mesh.shape['context']} cuts them; set "
      "that to 1, or config.learner.attention to 'xla'."
    )
  if any(model is not None and model.window for model in models):
    raise UserError(
      f"{asks} sees all tokens of a row, and the model's layers slide; set it to 'xla'."
    )
  return functools.partial(splash.attend, interpret=platform == 'cpu')


def _auxiliary_optimizer(config: Any, auxiliary: Any) -> optax.GradientTransformation | None:
  """The policy's, with a learning rate of its own."""
  if auxiliary is None:
    return None
  settings = config.optimizer.copy_and_resolve_references()
  settings.learning_rate = auxiliary.learning_rate
  return make_optimizer(settings, config.steps * config.learner.minibatches)[0]


def _exit(config: Any, vocab: int, token_texts: Callable[[], list[str]] | None) -> Callable:
  """The exit rule; one that looks for a text gets the automaton that finds it."""
  rule = pick(early_exit, config.rollout.early_exit, 'rollout.early_exit')
  if rule.func is early_exit.none:
    return early_exit.none
  text = rule.keywords.get('text')
  if text is None:
    return rule
  if not text or token_texts is None:
    raise UserError(
      f'config.rollout.early_exit.text={text!r} must not be empty, and needs a tokenizer that tells its texts.'
    )
  texts = token_texts()
  texts += [''] * (vocab - len(texts))  # some models have rows to spare
  return functools.partial(rule, table=jnp.asarray(text_automaton.build_table(texts, text)))


def _replays(config: Any) -> int:
  count = pick(successes, config.replay.reuse, 'replay.reuse')().count
  if count and objective.method(config.objective).needs_parts:
    raise UserError(
      f"config.replay.reuse.fn={config.replay.reuse.fn!r} keeps the sum of a row's rewards, and config.objective.advantage.fn="
      f'{config.objective.advantage.fn!r} looks at each of them; choose one of them.'
    )
  if count and config.rollout.pruning.fn != 'none':
    raise UserError(
      f'config.replay.reuse.fn={config.replay.reuse.fn!r} does not go with config.rollout.pruning.fn='
      f'{config.rollout.pruning.fn!r}, whose judge learns from sampled rollouts alone; choose one of them.'
    )
  return count


def _parts(config: Any, method: objective.Method, rule: dynamic_sampling.Rule | None) -> int:
  """Most slots of one prompt: by `config.replay.collect` in several calls, by `config.curriculum.slots_per_prompt` in one.

  Raises UserError where something takes a slot for a whole group.
  """
  each = config.curriculum.slots_per_prompt
  if each > config.prompts:
    raise UserError(
      f'config.curriculum.slots_per_prompt={each} slots a prompt are more than config.prompts={config.prompts} slots; lower it.'
    )
  parts = rule.most if rule else 1
  asks = f'config.replay.collect.fn={config.replay.collect.fn!r}'
  if each > 1:
    if parts > 1:
      raise UserError(
        f'{asks} and config.curriculum.slots_per_prompt={each} both give a prompt several slots; choose one of them.'
      )
    # All others have one at least.
    asks, parts = (
      f'config.curriculum.slots_per_prompt={each}',
      config.prompts - config.prompts // each + 1,
    )
  elif config.curriculum.allocation.fn != 'equal':
    raise UserError(
      f'config.curriculum.allocation.fn={config.curriculum.allocation.fn!r} has nothing to give with one slot a prompt; '
      'set config.curriculum.slots_per_prompt to 2 or more, and config.rollouts to that share of a group.'
    )
  if parts == 1:
    return 1
  if rule and rule.top_ups >= config.prompts:
    raise UserError(
      f'config.replay.collect.top_ups={rule.top_ups} leaves no slot for new prompts; it must be below '
      f'config.prompts={config.prompts}.'
    )
  takes = {
    'learner.minibatches': config.learner.minibatches > 1,
    'replay.reuse': config.replay.reuse.fn != 'none',
    'rewards.vote': config.rewards.vote.fn != 'none',
    'rollout.stop': config.rollout.stop.fn != 'none',
    'rollout.draft': config.rollout.draft.fn != 'none',
    'objective.sft_loss': method.needs_demo,
    'objective.auxiliary_model': method.auxiliary_model is not None,
  }
  for part in (name for name, used in takes.items() if used):
    raise UserError(
      f'{asks} gives a prompt several slots, and config.{part} takes a slot for a whole group; leave one of them at '
      'its default.'
    )
  return parts


def _hints(config: Any, method: objective.Method) -> bool:
  """Whether prompts get hints, and nothing else takes what they say for an answer to the plain prompt."""
  rule = pick(hint_rules, config.curriculum.hint, 'curriculum.hint')()
  if rule is None:
    return False
  takes = {
    'replay.reuse': config.replay.reuse.fn != 'none',
    'rewards.truncate': config.rewards.truncate.fn != 'none',
    'rollout.draft': config.rollout.draft.fn != 'none',
    'objective.sft_loss': method.needs_demo,
    'replay.collect': config.replay.collect.fn == 'dars',
  }
  if rule.plain:  # learned behind another prompt than it was sampled behind
    takes['rollout.stop'] = config.rollout.stop.fn != 'none'
  for part in (name for name, used in takes.items() if used):
    raise UserError(
      f'config.curriculum.hint.fn={config.curriculum.hint.fn!r} asks a prompt in other words, and config.{part} takes all its rollouts for '
      'answers to the same; leave one of them at its default.'
    )
  return True


def _contexts(config: Any, method: objective.Method) -> bool:
  given = config.curriculum.hint.fn == 'contexts'
  if method.needs_contexts and not given:
    raise UserError(
      f'config.objective.advantage.fn={config.objective.advantage.fn!r} compares strategies and '
      f'config.curriculum.hint.fn={config.curriculum.hint.fn!r} gives none; set config.curriculum.hint to contexts with its texts.'
    )
  return given


def _pruning(config: Any) -> pruning.PruningSettings | None:
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


def _tree(config: Any) -> tree_rules.TreeRules | None:
  """The rules of `config.rollout.tree`, and no part of generation that they cannot go with."""
  c, rules = config.rollout, pick(tree_rules, config.rollout.tree, 'rollout.tree')()
  if rules is None:
    return None
  asks = f'config.rollout.tree.fn={c.tree.fn!r} needs'
  if c.slots not in (0, config.prompts * config.rollouts):
    raise UserError(f'{asks} a slot for every row: set config.rollout.slots={c.slots} to 0.')
  if config.rollouts < 2:
    raise UserError(
      f'{asks} rows to fork into: raise config.rollouts={config.rollouts} to 2 or more.'
    )
  return rules
