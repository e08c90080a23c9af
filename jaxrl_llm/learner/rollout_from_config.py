"""The RolloutSpec of a config: how rows are sampled, dropped and continued."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.config.schema import Config
from jaxrl_llm.config.stages import active, pick
from jaxrl_llm.learner import attention_kernels
from jaxrl_llm.learner.step_spec import DraftSpec, ModelSpec, RolloutSpec
from jaxrl_llm.objective import score_centering
from jaxrl_llm.rollout import (
  draft_head,
  draft_verification,
  early_exit,
  length_head,
  pruning,
  queue_order,
  stopping,
  text_automaton,
  tree_rules,
)
from jaxrl_llm.rollout.decode_records import DecodeSettings, Loops, TokenRecords
from jaxrl_llm.rollout.ngram_drafts import NgramSettings
from jaxrl_llm.rollout.pruning import PruningSettings
from jaxrl_llm.rollout.tree_rules import TreeRules
from jaxrl_llm.types import UserError

_CPU_HALVINGS = 2


def on_cpu(mesh: jax.sharding.Mesh) -> bool:
  """Whether the devices of a mesh are CPUs."""
  return mesh.devices.flat[0].platform == 'cpu'


def rollout_spec(
  config: Config,
  model: ModelSpec,
  end_ids: tuple[int, ...],
  token_texts: Callable[[], list[str]] | None,
  mesh: jax.sharding.Mesh,
) -> RolloutSpec:
  """How the rollouts of a step are sampled. Raises UserError for settings that do not go together."""
  pruning_settings, multi_turn = _pruning(config), config.environment.fn != 'none'
  head = pick(length_head, config.rollout.length_head, 'rollout.length_head')()
  # A CPU takes time by the rows that it decodes. A TPU reads all weights for few rows, too, and compiles for minutes.
  halvings = _CPU_HALVINGS if on_cpu(mesh) else 0
  loops = Loops(config.rollout.windows, halvings, config.rollout.test_every)
  decode = _decode(config, model, end_ids, token_texts)._replace(
    attend=attention_kernels.of_decoding(config, mesh), loops=loops
  )
  return RolloutSpec(
    decode=decode,
    drafts=_drafts(config),
    pruning=pruning_settings,
    features=model.config.width if pruning_settings or head else 0,
    tree=_tree(config),
    # With mode='lag' the host continues the rows of the call before the last one.
    carried_calls=config.rollout.carry_cache * (2 if config.mode == 'lag' else 1),
    lockstep=config.rollout.lockstep,
    multi_turn=multi_turn,
    continues=multi_turn or config.rollout.stop.fn != 'none',
    # Each turn of an environment begins with an empty memory.
    exit_memory=decode.exit_rule is not None and not multi_turn,
    length_head=head and head.for_completions(config.completion_tokens),
  )


def _decode(
  config: Config,
  model: ModelSpec,
  end_ids: tuple[int, ...],
  token_texts: Callable[[], list[str]] | None,
) -> DecodeSettings:
  settings, centering = config.rollout, config.objective.score_centering
  term = pick(score_centering, centering, 'objective.score_centering')()
  top = 0 if term is None else term.top_k
  return DecodeSettings(
    rollouts=config.rollouts,
    max_tokens=config.completion_tokens,
    temperature=config.temperature,
    end_ids=end_ids,
    dtype=model.dtype,
    slots=settings.slots,
    queue_order=pick(queue_order, settings.queue_order, 'rollout.queue_order'),
    stop_rule=active(pick(stopping, settings.stop, 'rollout.stop')),
    exit_rule=_exit_rule(config, model.config.vocab, token_texts),
    cache_dtype=model.dtype if settings.cache_dtype == 'auto' else settings.cache_dtype,
    records=TokenRecords(config.learner.replay_experts, min(top, model.config.vocab)),
  )


def _drafts(config: Config) -> DraftSpec:
  verify, ngram = config.rollout.draft, config.rollout.ngram
  head = pick(draft_head, config.rollout.draft_head, 'rollout.draft_head')()
  if head is not None and head.tokens >= config.completion_tokens:
    raise UserError(
      f'config.rollout.draft_head.tokens={head.tokens} must be below config.completion_tokens='
      f'{config.completion_tokens}.'
    )
  if head is not None and head.rollouts > config.rollouts:
    raise UserError(
      f'config.rollout.draft_head.rollouts={head.rollouts} must be at most config.rollouts={config.rollouts}.'
    )
  return DraftSpec(
    verify=active(pick(draft_verification, verify, 'rollout.draft')),
    records_noise=verify.fn == 'coupled',
    ngram=NgramSettings(**ngram) if ngram.draft else None,
    head=head,
  )


def _exit_rule(
  config: Config, vocab: int, token_texts: Callable[[], list[str]] | None
) -> Callable | None:
  """The early-exit rule; a rule that searches for a text gets the automaton's table."""
  settings = config.rollout.early_exit
  rule, text = active(pick(early_exit, settings, 'rollout.early_exit')), settings.get('text')
  if rule is None or text is None:
    return rule
  if not text or token_texts is None:
    raise UserError(
      f'config.rollout.early_exit.text={text!r} must not be empty, and needs a tokenizer with a text for each token.'
    )
  texts = token_texts()
  texts += [''] * (vocab - len(texts))  # some models have more embeddings than tokens
  return functools.partial(rule, table=jnp.asarray(text_automaton.build_table(texts, text)))


def _pruning(config: Config) -> PruningSettings | None:
  settings = pick(pruning, config.rollout.pruning, 'rollout.pruning')()
  if settings is None:
    return None
  candidates, floor = settings.candidates, settings.floor
  if candidates <= config.rollouts:
    raise UserError(
      f'config.rollout.pruning.candidates={candidates} must be more than config.rollouts='
      f'{config.rollouts}, the rollouts that survive.'
    )
  if floor * candidates > config.rollouts:
    raise UserError(
      f'config.rollout.pruning.floor={floor} promises more survivors than there are: {candidates} candidates '
      f'keep at least {floor * candidates:g} of config.rollouts={config.rollouts}; set floor to at most '
      f'{config.rollouts / candidates:g}, or lower candidates.'
    )
  if not 1 <= settings.at_tokens < config.completion_tokens:
    raise UserError(
      f'config.rollout.pruning.at_tokens={settings.at_tokens} must lie between 1 and config.completion_tokens - 1 = '
      f'{config.completion_tokens - 1}.'
    )
  return settings


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
