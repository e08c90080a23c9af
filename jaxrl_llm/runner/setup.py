"""From a config to the parts of a run: models, data, the program, the host's state; all checked, nothing compiled."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from jaxrl_llm import curriculum, data, environments, models, replay
from jaxrl_llm import rewards as rewards_lib
from jaxrl_llm.config import stages
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.step_spec import StepSpec, check_objective, check_rows, make_spec
from jaxrl_llm.models import peft
from jaxrl_llm.monitoring import alarms
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.rollout import length_schedule as caps
from jaxrl_llm.runner import hints, multi_turn, token_stats, validate
from jaxrl_llm.runner.host_step import Parts
from jaxrl_llm.types import Model, UserError


def parts(config: Any, mesh: jax.sharding.Mesh | None = None) -> Parts:
  """All that `config` names, loaded; `mesh` overrides config.mesh. Raises UserError for bad input. Source: none."""
  validate.validate(config)
  check_objective(config)
  grading = _grading(config)
  if any(part.grader is not None for part in grading['rewards']):
    rewards_lib.check_tasks(config.rewards, config.data)
  mesh = mesh or sharding.make_mesh(config.mesh)
  check_rows(config, mesh)
  model = models.load(config.model, scratch=config.scratch, seed=config.seed)
  tables = data.load(config, model.tokenizer)
  _check_sizes(config, model, len(tables.train))
  both = (*tables.train.rows, *tables.held_out.rows)
  if grading['vote'] is None:  # with one, answers are for the log, and there may be none
    named = [(part.name, part.grader) for part in grading['rewards'] if part.grader is not None]
    rewards_lib.check_rows(named, both)
  teacher = _teacher(config, model)
  spec = _program(config, model, teacher, mesh, tables)
  return Parts(
    config=config,
    model=model,
    mesh=mesh,
    spec=spec,
    tables=tables,
    curriculum=_curriculum(config, tables.train),
    lengths=curriculum.LengthEstimate(len(tables.train)),
    unfinished=replay.PartialRollouts(
      config.rollouts, config.rollout.max_age, sharding.rows_shards(mesh)
    ),
    drafts=replay.Drafts(config.rollouts, config.rollout.draft_memory_mb),
    successes=stages.pick(replay.successes, config.replay.reuse, 'replay.reuse')(),
    aid=_aid(config, tables.train, model.tokenizer),
    allocate=_allocation(config),
    collect=_collector(config, len(tables.train), spec.objective.method),
    cap=_cap(config),
    health=alarms.Health(config, spec.model.dtype),
    teacher=teacher,
    adapter=_adapter(config, spec),
    play=_play(config, model.tokenizer, spec, tables.train.rows),
    ledger=_ledger(config, spec, model.tokenizer),
    **grading,
  )


def _ledger(config: Any, spec: Any, tokenizer: Any) -> token_stats.Ledger | None:
  """Only the first process writes rollouts."""
  told = config.monitoring.rollouts_tokens and jax.process_index() == 0
  return token_stats.Ledger(spec, config, tokenizer.backend) if told else None


def _grading(config: Any) -> dict[str, Any]:
  """What turns texts into rewards."""
  labels = stages.pick(curriculum.labels, config.curriculum.labels, 'curriculum.labels')()
  field = f'config.curriculum.labels.fn={config.curriculum.labels.fn!r}'
  rewards = _rewards(config)
  named = {
    'rewards.truncate': config.rewards.truncate.fn,
    'curriculum.labels': config.curriculum.labels.fn,
  }
  again = [(name, fn) for name, fn in named.items() if fn != 'none']
  if again and any(rewards_lib.batched(config.rewards)):
    name, fn = again[0]
    raise UserError(
      f'config.{name}.fn={fn!r} has some replies graded once more, and a batched grader would see '
      f"these without the others of their group; leave config.{name}.fn='none', or batched empty."
    )
  return dict(
    rewards=rewards,
    vote=rewards_lib.resolve_vote(config.rewards.vote, config.rewards, config.rollouts),
    labels=labels,
    read=labels and rewards_lib.resolve_extract(config.rewards, field),
    truncate=stages.pick(
      rewards_lib.length_truncation, config.rewards.truncate, 'rewards.truncate'
    )(),
    failures=rewards_lib.Failures(config.rewards),
  )


def _rewards(config: Any) -> tuple[rewards_lib.Part, ...]:
  """What rows are paid for; an environment's pay has no grader."""
  if environments.resolve(config.environment) is None:
    return rewards_lib.resolve_parts(config.rewards)
  if config.environment.judge == 'rewards':
    own = rewards_lib.Part('environment', config.environment.weight, None)
    return *rewards_lib.resolve_parts(config.rewards), own
  if config.rewards.parts:
    raise UserError(
      f"config.environment.judge='environment' asks no grader, and config.rewards.parts={config.rewards.parts!r} are some; "
      "set judge='rewards', or leave the parts empty."
    )
  return (rewards_lib.Part('environment', 1.0, None),)


def _play(config: Any, tokenizer: Any, spec: StepSpec, rows: Any) -> multi_turn.Play | None:
  multi_turn.check(config, spec.objective.method)
  if config.environment.fn == 'none':
    return None
  if jax.process_count() > 1:
    raise UserError(
      f'config.environment.fn={config.environment.fn!r} runs in one process alone, and there are '
      f'{jax.process_count()}; start one.'
    )
  horizon = stages.pick(caps, config.environment.horizon, 'environment.horizon')
  horizon(0, config.environment.turns)  # checks its settings
  play = multi_turn.Play(config, tokenizer, horizon)
  if play.stage.factory.inline:
    (tried,) = play.stage.run([environments.TurnRequest(rows[0], 0, [])])
    if tried.outcome != rewards_lib.OK:
      raise UserError(
        f'config.environment.fn={config.environment.fn!r} cannot begin with a row of the data ({tried.message}); '
        "choose rows that are its own, such as those of config.data.source='games'."
      )
  return play


def _check_sizes(config: Any, model: Model, prompts: int) -> None:
  if config.prompts > prompts:
    raise UserError(
      f'config.prompts={config.prompts} is more than the {prompts} prompts of the data; '
      'lower it, or raise config.data.size.'
    )
  tokens, most = config.prompt_tokens + config.completion_tokens, model.config.max_tokens
  if tokens > most:
    scratch = config.model == 'scratch'
    reads = 'config.scratch.max_tokens=' if scratch else f'config.model={config.model!r} reads '
    raise UserError(
      f'config.prompt_tokens={config.prompt_tokens} and config.completion_tokens={config.completion_tokens} are '
      f'{tokens} together, and {reads}{most}; lower one of them{", or raise that" if scratch else ""}.'
    )


def _program(config: Any, model: Model, teacher: Model | None, mesh: Any, tables: Any) -> StepSpec:
  tokenizer, theirs = model.tokenizer, teacher and teacher.config
  spec = make_spec(
    config, model.config, tokenizer.end_ids, mesh, tokenizer.token_texts, theirs
  )
  if spec.objective.method.needs_demo:
    field = f'config.objective.sft_loss.fn={config.objective.sft_loss.fn!r}'
    data.check_demonstrations(tables.train.rows, tokenizer, field)
  return spec


def _curriculum(config: Any, table: data.PromptTable) -> curriculum.Curriculum:
  return curriculum.Curriculum(
    config.curriculum,
    len(table),
    group=config.rollouts * config.curriculum.slots_per_prompt,
    seed=config.seed,
    kind=data.kinds(table.rows),
    columns=data.Columns(table.rows),
  )


def _cap(config: Any) -> Any:
  rule = stages.pick(caps, config.rollout.length_schedule, 'rollout.length_schedule')
  rule(0, config.completion_tokens)  # checks its settings
  return rule


def _aid(config: Any, table: data.PromptTable, tokenizer: Any) -> hints.Aid | None:
  rule = stages.pick(curriculum.hint_rules, config.curriculum.hint, 'curriculum.hint')()
  return rule and hints.Aid(rule, table, tokenizer, config.data, config.seed)


def _allocation(config: Any) -> Any:
  rule = stages.pick(curriculum.allocation, config.curriculum.allocation, 'curriculum.allocation')
  each = config.curriculum.slots_per_prompt
  count = max(config.prompts // each, 1)
  told = np.ones(count), np.ones(count), np.zeros(count)
  rule(*told, config.prompts, config.rollouts)  # checks its settings
  return rule


def _collector(config: Any, size: int, method: Any) -> replay.Collector | None:
  rule = stages.pick(replay.dynamic_sampling, config.replay.collect, 'replay.collect')()
  if rule is not None and rule.top_ups and size < 3 * config.prompts:
    raise UserError(
      f'config.replay.collect.fn={config.replay.collect.fn!r} keeps prompts waiting for rollouts, so that {size} prompts of data are '
      f'too few for config.prompts={config.prompts}; lower that to a third of them, or raise config.data.size.'
    )
  compared = functools.partial(outcomes.compared, method)
  return rule and replay.Collector(rule, config.prompts, config.rollouts, compared)


def _adapter(config: Any, spec: StepSpec) -> Any:
  """That of config.lora.init; None for a fresh one."""
  if not config.lora.init:
    return None
  if spec.objective.method.needs_reference:
    raise UserError(
      f'config.lora.init={config.lora.init!r} begins away from the base, and the method is held near the base; export '
      'the merged model and begin from that, or set config.objective.kl.fn=none.'
    )
  return peft.load(config.lora.init, spec.model.config, spec.model.lora)


def _teacher(config: Any, model: Model) -> Model | None:
  """The model of config.objective.teacher, which must read and write the tokens of `model`."""
  name = config.objective.teacher
  if not name:
    return None
  try:
    teacher = models.load(name, scratch=config.scratch, seed=config.seed)
  except UserError as error:
    raise UserError(str(error).replace('config.model', 'config.objective.teacher')) from error
  theirs, ours = (x.tokenizer.backend.get_vocab() for x in (teacher, model))
  if theirs != ours or teacher.config.vocab < model.config.vocab:
    raise UserError(
      f'config.objective.teacher={name!r} has other tokens than config.model={config.model!r} ({len(theirs)} '
      f'of {teacher.config.vocab} against {len(ours)} of {model.config.vocab}); name one of the same family.'
    )
  return teacher
