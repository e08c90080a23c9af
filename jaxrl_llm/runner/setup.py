"""Builds the run context of a validated config: models, data, step specification, host-side state. Compiles nothing."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import curriculum, data, environments, models, objective, replay, rewards
from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.config import stages
from jaxrl_llm.config.schema import Config, Stage, typed
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.spec_from_config import check_objective, check_rows, make_spec
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import peft, positions
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.monitoring import alarms
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.rollout import length_schedule, prompt_prefix
from jaxrl_llm.runner import (
  corrected_prompts,
  endpoint,
  hints,
  multi_turn,
  reflected_retries,
  rewritten_prompts,
  teacher_text,
  token_stats,
  validate,
  written_hints,
)
from jaxrl_llm.runner.context import Grading, Models, ReplayBuffers, RunContext, Selection
from jaxrl_llm.types import Model, Row, UserError


def build_context(config: Config, mesh: jax.sharding.Mesh | None = None) -> RunContext:
  """Load everything that `config` names; `mesh` overrides config.mesh. Raises UserError for bad input."""
  validate.validate(config)
  config = typed(config)
  check_objective(config)
  grading = _grading(config)
  graded = any(part.grader is not None for part in grading.rewards)
  if graded:
    rewards.check_tasks(config.rewards, config.data)
  mesh = mesh or sharding.make_mesh(config.mesh.to_dict())
  check_rows(config, mesh)
  rows = data.load_rows(config)
  if rows.verifier:  # its package may be missing
    rewards.resolve(rewards.with_function(config.rewards, rows.verifier))
  if graded and rows.train:
    rewards.check_columns([(part.name, part.grader) for part in grading.rewards], rows.train)
    rewards.check_first_row(config.rewards, rows.train[0])
  model = models.load(config.model, scratch=config.scratch, seed=config.seed)
  if tools := environments.list_tools(config.environment):  # rendered in every prompt
    model = model._replace(tokenizer=model.tokenizer._replace(tools=tools))
  tables = data.load(config, model.tokenizer, rows)
  _check_sizes(config, model, len(tables.train))
  _check_rewards(config, grading, tables)
  teacher = _teacher(config, model)
  spec = _step_spec(config, model, teacher, mesh, tables)
  return RunContext(
    config=config,
    models=Models(model, teacher, load_adapter(config, spec)),
    spec=spec,
    tables=tables,
    selection=_selection(config, tables.train, model.tokenizer),
    replay=_replay_buffers(config, spec, mesh, len(tables.train)),
    grading=grading,
    health=alarms.Health(config, spec.model.dtype),
    episodes=_episodes(config, model, tables.train.rows, mesh.size),
    token_stats=_token_stats(config, spec, model.tokenizer),
    teacher_text=_teacher_text(config, model, teacher, tables),
  )


def _token_stats(
  config: Config, spec: StepSpec, tokenizer: Tokenizer
) -> token_stats.TokenStats | None:
  """Only the first process writes rollouts."""
  if not config.monitoring.rollouts_tokens or jax.process_index():
    return None
  return token_stats.TokenStats(spec, config, tokenizer.backend)


def _grading(config: Config) -> Grading:
  labels = stages.pick(curriculum.labels, config.curriculum.labels, 'curriculum.labels')()
  field = f'config.curriculum.labels.fn={config.curriculum.labels.fn!r}'
  parts = _rewards(config)
  return Grading(
    rewards=parts,
    vote=rewards.resolve_vote(config.rewards.vote, config.rewards, config.rollouts),
    labels=labels,
    read_answer=labels and rewards.resolve_extract(config.rewards, field),
    truncate=stages.pick(rewards.length_truncation, config.rewards.truncate, 'rewards.truncate')(),
    failures=rewards.FailurePolicy(config.rewards),
    scale=outcomes.scale(config.rewards),
  )


def _rewards(config: Config) -> tuple[rewards.Part, ...]:
  """The rewards of a completion; an environment's rewards have no grader."""
  if environments.resolve(config.environment) is None:
    return rewards.resolve_parts(config.rewards)
  if config.environment.judge == 'rewards':
    environment = rewards.Part('environment', config.environment.weight, None)
    return *rewards.resolve_parts(config.rewards), environment
  return (rewards.Part('environment', 1.0, None),)


def _check_rewards(config: Config, grading: Grading, tables: data.Tables) -> None:
  """Raises UserError for a data row that a reward function cannot grade."""
  rows = tables.train.rows
  if tables.held_out.verifier:
    verifier = rewards.resolve(rewards.with_function(config.rewards, tables.held_out.verifier))
    rewards.check_rows([(tables.held_out.verifier, verifier)], tables.held_out.rows)
  else:
    rows = (*rows, *tables.held_out.rows)
  if grading.vote is not None:  # labels are only logged, and may be missing
    return
  named = [(part.name, part.grader) for part in grading.rewards if part.grader is not None]
  rewards.check_rows(named, rows)


def _episodes(
  config: Config, model: Model, rows: Sequence[Row], devices: int
) -> multi_turn.Episodes | endpoint.HarnessEpisodes | None:
  if config.environment.fn == 'none':
    return None
  if jax.process_count() > 1:
    raise UserError(
      f'config.environment.fn={config.environment.fn!r} runs in one process alone, and there are '
      f'{jax.process_count()}; start one.'
    )
  if config.environment.fn == 'endpoint':
    return endpoint.HarnessEpisodes(config, model)
  horizon = _schedule(config.environment.horizon, 'environment.horizon', config.environment.turns)
  episodes = multi_turn.Episodes(config, model.tokenizer, horizon)
  if episodes.batching is not None and devices > 1:
    raise UserError(
      f'config.environment.batching.fn={config.environment.batching.fn!r} decodes on one device, and the mesh has '
      f'{devices}; set --config.environment.batching.fn=lockstep, or --config.mesh.fsdp=1.'
    )
  factory = episodes.environments.factory
  if factory is not None and factory.inline:
    request = environments.TurnRequest((0, 0, 0, 0), rows[0], 0, [])
    (opening,) = episodes.environments.run([request])
    episodes.environments.end([request.key])
    if opening.outcome != rewards.OK:
      raise UserError(
        f'config.environment.fn={config.environment.fn!r} cannot begin with a row of the data ({opening.message}); '
        "choose rows that are its own, such as those of config.data.source='games'."
      )
  return episodes


def _check_sizes(config: Config, model: Model, prompts: int) -> None:
  if config.prompts > prompts:
    raise UserError(
      f'config.prompts={config.prompts} is more than the {prompts} prompts of the data; '
      'lower it, or raise config.data.size.'
    )
  longest = config.longest_prompt_tokens
  tokens = longest + config.completion_tokens
  limit = positions.for_context(model.config, tokens).max_tokens
  if tokens > limit:
    scratch = config.model == 'scratch'
    section = 'objective.distillation.' if longest > config.prompt_tokens else ''
    reads = 'config.scratch.max_tokens=' if scratch else f'config.model={config.model!r} reads '
    raise UserError(
      f'config.{section}prompt_tokens={longest} and config.completion_tokens={config.completion_tokens} are '
      f'{tokens} together, and {reads}{limit}; lower one of them{", or raise that" if scratch else ""}.'
    )


def _step_spec(
  config: Config, model: Model, teacher: Model | None, mesh: jax.sharding.Mesh, tables: data.Tables
) -> StepSpec:
  tokenizer, teacher_config = model.tokenizer, teacher and teacher.config
  spec = make_spec(
    config, model.config, tokenizer.end_ids, mesh, tokenizer.token_texts, teacher_config
  )
  fixed_prompts = config.curriculum.hint.fn == 'none' and config.environment.fn == 'none'
  # Hints and environments change prompts, which may then begin otherwise. Sums over a prompt in two parts differ from
  # those of the update.
  if fixed_prompts and not spec.model.config.is_exact:
    prefix = prompt_prefix.shared_tokens(tables.train.tokens, mesh.devices.flat[0].platform)
    spec = spec._replace(layout=spec.layout._replace(prefix_tokens=prefix))
  for stage in ('sft_loss', 'distillation'):
    name = config.objective[stage].fn
    if name == 'solved_by_data' or (stage == 'sft_loss' and spec.objective.method.needs_demo):
      field = f'config.objective.{stage}.fn={name!r}'
      data.check_demonstrations(tables.train.rows, tokenizer, field)
  return spec


def _selection(config: Config, table: data.PromptTable, tokenizer: Tokenizer) -> Selection:
  return Selection(
    curriculum=make_curriculum(config, table),
    lengths=curriculum.LengthEstimate(len(table)),
    allocate=_allocation(config),
    hints=_hints(config, table, tokenizer),
    length_cap=_schedule(
      config.rollout.length_schedule, 'rollout.length_schedule', config.completion_tokens
    ),
  )


def make_curriculum(config: Config, table: data.PromptTable) -> curriculum.Curriculum:
  """The curriculum over all prompts of `table`; groups are those of all slots of a prompt."""
  return curriculum.Curriculum(
    config.curriculum,
    len(table),
    group=config.rollouts * config.curriculum.slots_per_prompt,
    seed=config.seed,
    kind=data.kinds(table.rows, table.file_tokens_N),
    columns=data.Columns(table.rows, table.file_tokens_N),
  )


def _schedule(settings: Stage, field: str, most: int) -> Callable[..., int] | None:
  """The length schedule, after a check of its settings; None where every step has the largest length `most`."""
  rule = stages.active(stages.pick(length_schedule, settings, field))
  if rule is not None:
    rule(0, most)
  return rule


def _hints(
  config: Config, table: data.PromptTable, tokenizer: Tokenizer
) -> hints.HintProvider | None:
  rule = stages.pick(curriculum.hint_rules, config.curriculum.hint, 'curriculum.hint')()
  if rule is None:
    return None
  if not rule.learned:
    field = f'config.curriculum.hint.fn={config.curriculum.hint.fn!r}'
    data.check_demonstrations(table.rows, tokenizer, field)
  inputs = rule, table, tokenizer, config.data, config.seed
  if rule.correction is not None:
    part = corrected_prompts.part_column(config.rewards, rule.correction.part)
    return corrected_prompts.CorrectedPrompts(*inputs, part)
  if rule.rewriting is not None:
    return rewritten_prompts.RewrittenPrompts(*inputs)
  if rule.reflection is not None:
    return reflected_retries.ReflectedRetries(*inputs)
  if rule.writing is None:
    return hints.HintProvider(*inputs)
  if rule.writing.hints > config.rollouts:
    raise UserError(
      f'config.curriculum.hint.hints={rule.writing.hints} replies of a request are more than its '
      f'config.rollouts={config.rollouts}; lower it, or raise that.'
    )
  if not any(data.demonstration(row) for row in table.rows):
    raise UserError(
      "config.curriculum.hint.fn='written' needs solutions, and no row of the data has one or an answer; add a column "
      "'solution', or choose another function."
    )
  return written_hints.WrittenHints(*inputs)


def _allocation(config: Config) -> Callable[..., curriculum.allocation.Allocation]:
  rule = stages.pick(curriculum.allocation, config.curriculum.allocation, 'curriculum.allocation')
  count = max(config.prompts // config.curriculum.slots_per_prompt, 1)
  alpha, beta, lengths = np.ones(count), np.ones(count), np.zeros(count)
  rule(alpha, beta, lengths, config.prompts, config.rollouts)  # checks its settings
  return rule


def _replay_buffers(
  config: Config, spec: StepSpec, mesh: jax.sharding.Mesh, rows: int
) -> ReplayBuffers:
  shards = sharding.rows_shards(mesh)
  store = stages.pick(replay.reuse, config.replay.reuse, 'replay.reuse')()
  if isinstance(store, replay.SharedRollouts):
    _check_shared_folder(store.folder)
  return ReplayBuffers(
    unfinished=replay.PartialRollouts(config.rollouts, config.rollout.max_age, shards)
    if spec.rollout.continues
    else None,
    drafts=replay.Drafts(config.rollouts, config.rollout.draft_memory_mb)
    if spec.rollout.drafts.verify
    else None,
    reuse=store,
    collector=_collector(config, rows, spec.objective.method),
  )


def _check_shared_folder(folder: str) -> None:
  if jax.process_count() > 1:
    raise UserError(
      f"config.replay.reuse.fn='shared' reads a folder in one process alone, and there are {jax.process_count()}; "
      'start one.'
    )
  if problem := safe_files.file_write_problem(os.path.join(folder, 'run')):
    raise UserError(
      f'config.replay.reuse.folder={folder!r} cannot be written ({problem}); name another folder.'
    )


def _collector(
  config: Config, rows: int, method: objective.Method
) -> replay.Collector | None:  # fmt: skip
  rule = stages.pick(replay.dynamic_sampling, config.replay.collect, 'replay.collect')()
  if rule is not None and rule.top_ups and rows < 3 * config.prompts:
    raise UserError(
      f'config.replay.collect.fn={config.replay.collect.fn!r} keeps prompts waiting for rollouts, so that '
      f'{rows} prompts of data are '
      f'too few for config.prompts={config.prompts}; lower that to a third of them, or raise config.data.size.'
    )
  compared = functools.partial(outcomes.compared, method)
  return rule and replay.Collector(rule, config.prompts, config.rollouts, compared)


def load_adapter(config: Config, spec: StepSpec) -> Any:
  """The adapter of config.lora.init; None for a fresh one."""
  settings = spec.model.lora
  if not config.lora.init or settings is None:
    return None
  if spec.objective.method.needs_reference:
    raise UserError(
      f'config.lora.init={config.lora.init!r} begins away from the base, and the method is held near the base; export '
      'the merged model and begin from that, or set config.objective.kl.fn=none.'
    )
  return peft.load(config.lora.init, spec.model.config, settings)


def _teacher(config: Config, model: Model) -> Model | None:
  """The model of config.objective.teacher. Raises UserError where its vocabulary must be that of `model` and is not."""
  name = config.objective.teacher
  if not name:
    return None
  try:
    teacher = models.load(name, scratch=config.scratch, seed=config.seed)
  except UserError as error:
    raise UserError(str(error).replace('config.model', 'config.objective.teacher')) from error
  if teacher_text.is_used(config):
    return teacher
  theirs, ours = (x.tokenizer.backend.get_vocab() for x in (teacher, model))
  if theirs != ours or teacher.config.vocab < model.config.vocab:
    raise UserError(
      f'config.objective.teacher={name!r} has other tokens than config.model={config.model!r} ({len(theirs)} '
      f'of {teacher.config.vocab} against {len(ours)} of {model.config.vocab}); name one of the same family, or set '
      '--config.objective.distillation.fn=on_policy_spans.'
    )
  return teacher


def _teacher_text(
  config: Config, model: Model, teacher: Model | None, tables: data.Tables
) -> teacher_text.TeacherText | None:
  if teacher is None or not teacher_text.is_used(config):
    return None
  sizes = config.objective.distillation
  if sizes['teacher_completion_tokens'] < 1:
    raise UserError(
      'config.objective.distillation.teacher_completion_tokens='
      f'{sizes["teacher_completion_tokens"]} must be at least 1; set it to about those of config.completion_tokens.'
    )
  tokens = sizes['teacher_prompt_tokens'] + sizes['teacher_completion_tokens']
  limit = positions.for_context(teacher.config, tokens).max_tokens
  if tokens > limit:
    raise UserError(
      f'config.objective.distillation.teacher_prompt_tokens={sizes["teacher_prompt_tokens"]} and '
      f'teacher_completion_tokens={sizes["teacher_completion_tokens"]} are {tokens} together, and '
      f'config.objective.teacher={config.objective.teacher!r} reads {limit}; lower one of them.'
    )
  rows = tables.train.rows
  return teacher_text.TeacherText(config, model.tokenizer, teacher.tokenizer, rows)
