"""The host loop, in reading order: set up, evaluate, then propose → step → land, and save."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from typing import Any

import jax
from absl import logging

from jaxrl_llm import evaluation, rewards, rollout
from jaxrl_llm import step as steps
from jaxrl_llm.checkpointing import checkpoint, metrics_log, run_dir
from jaxrl_llm.commands import chat
from jaxrl_llm.distributed import consistency, preemption, sharding
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.models import export, peft
from jaxrl_llm.monitoring import console
from jaxrl_llm.objective import record_checks
from jaxrl_llm.runner import (
  host_step,
  log_records,
  multi_turn,
  setup,
  sft,
  sharded_grading,
  validate,
)
from jaxrl_llm.runner.host_step import Parts
from jaxrl_llm.runner.run_logger import Journal
from jaxrl_llm.types import Batch, UserError

# What the checkpoint keeps of the host.
_HOST_STATE = (
  'curriculum',
  'lengths',
  'unfinished',
  'drafts',
  'successes',
  'collect',
  'aid',
  'labels',
  'failures',
  'health',
)


def run(config: Any, workdir: str, mesh: jax.sharding.Mesh | None = None) -> dict[str, float]:
  """Trains as `config` says inside `workdir`, and resumes what lies there. Returns the last evaluation.

  `mesh` overrides `config.mesh`. Raises UserError for bad input, before compiling. Source: none.
  """
  config = validate.sized(
    config, jax.devices() if mesh is None else mesh.devices.flatten().tolist()
  )
  parts = setup.parts(config, mesh)
  folder = open_folder(workdir, config)
  with (
    rewards.Pool(config.rewards) as pool,
    _stage(parts),
    console.open_console(config.monitoring.console, config.steps) as screen,
  ):
    screen.banner(**log_records.facts(config, parts.spec.layout.mesh.devices, folder.root))
    return _loop(parts, folder, sharded_grading.Pool(pool), screen)


def open_folder(workdir: str, config: Any) -> run_dir.RunDirectory:
  """The run directory, compared with its checkpoints, too. Raises UserError as `workdir.open_run` does."""
  held = os.path.join(workdir, 'checkpoints')
  return run_dir.open_run(
    workdir, config, steps=checkpoint.saved_steps(held), saved=checkpoint.saved_config(held)
  )


def _loop(parts: Parts, folder: Any, pool: rewards.Pool, screen: Any) -> dict[str, float]:
  config, keep = parts.config, parts.config.checkpoint.keep
  spent = run_dir.TimeSpent(folder.root)
  examine = spent.timed('evaluation', _evaluator(parts, pool, folder, screen))
  with (
    preemption.PreemptionHandler(alone=jax.process_count() == 1) as preemption_handler,
    checkpoint.Saver(folder.checkpoints, keep, folder.record_checkpoint) as saver,
  ):
    keep_all = spent.timed('checkpoints', functools.partial(_save, parts, saver))
    with preemption_handler.interruptible():
      state, batch, flight, start = _begin(parts, folder, screen, spent)
      examined = {}
      if start == 0 or _due(config.evaluation.every, start):
        examined = examine(state, start)
    if not config.steps:  # a supervised start was all there is to do
      keep_all(0, state, batch, flight)
    call = _compiled(parts)
    first_row = max(start - (flight is not None), 0)
    with Journal(parts, folder, screen, start, first_row) as journal:
      journal.examined(start, examined)
      for index in range(start, config.steps):
        journal.begins(index, state)
        began = time.perf_counter()
        choice = host_step.choose(parts, index)
        prompts, *more = host_step.propose(parts, index, choice)
        journal.chose(choice.told)
        if jax.process_count() > 1 and _due(config.processes.same_every, index - start):
          consistency.check(index, _held(parts, index, prompts, batch))
        if index == start:
          journal.compiling()
        asked_at = time.perf_counter()
        state, rollout, device = call(state, batch, prompts, *more)
        if index == start:
          compiled_s = time.perf_counter() - asked_at
          journal.compiled(compiled_s)
          spent.add('compilation', compiled_s)
          began, asked_at = began + compiled_s, asked_at + compiled_s  # no part of the step
        # The call returns at once. Where the host lags, it grades the flight before this one meanwhile.
        flight, landing = host_step.Flight(index, prompts, rollout, device, batch), flight
        if config.mode != 'lag':
          flight, landing = None, flight
        if landing is not None:
          batch = _land(parts, pool, journal, landing, began, asked_at)
        save = functools.partial(keep_all, index + 1, state, batch, flight)
        preempt = sharding.any_process(preemption_handler.requested)
        if preempt or _due(config.checkpoint.every, index + 1) or index + 1 == config.steps:
          save()
        if preempt:
          raise preemption.Preempted
        if _due(config.evaluation.every, index + 1) and index + 1 < config.steps:
          with preemption_handler.interruptible(save):
            journal.examined(index + 1, examine(state, index + 1))
      journal.ends(state)
      if flight is not None:
        now = time.perf_counter()
        _land(parts, pool, journal, flight, now, now)
      saver.wait()
      with preemption_handler.interruptible():
        final = examine(state, config.steps)
      journal.examined(config.steps, final)
  journal.finish()
  return final.get('metrics', {})


def _stage(parts: Parts) -> Any:
  """Ends the environments' workers with the run."""
  return contextlib.nullcontext() if parts.play is None else contextlib.closing(parts.play.stage)


def _compiled(parts: Parts) -> Any:
  """The calls of a step: of one program, of its two halves, or of one for every round of turns."""
  if parts.play is not None:
    return multi_turn.compile_call(parts)
  compile_call = steps.compile_split if parts.config.mode == 'split' else steps.compile_step
  return compile_call(parts.spec)


def _due(every: int, done: int) -> bool:
  return every > 0 and done % every == 0


def _begin(parts: Parts, folder: Any, screen: Any, spent: run_dir.TimeSpent):
  """What `_restore` finds; a fresh start is warmed up where config.sft says so.

  Without further steps that is a run of its own, whose checkpoint is of step 0.
  """
  config = parts.config
  state, batch, flight, start = _restore(parts, folder, screen, trains=True)
  fresh = start == 0 and checkpoint.latest(folder.checkpoints) is None
  if fresh and config.sft.steps:
    screen.info(f'supervised warm start, {config.sft.steps} steps')
    rows, tokenizer = parts.tables.train, parts.model.tokenizer
    kept = metrics_log.Writer(folder.sft, 0, jax.process_index() == 0, sync=False)
    with spent.on('warm start'), kept:
      losses = sft.Losses(config.sft.steps, kept.write, screen)
      state = sft.run(config, parts.spec, state, rows, tokenizer, losses)
  return state, batch, flight, start


def _land(
  parts: Parts, pool: Any, journal: Journal, flight: host_step.Flight, began: float, asked_at: float
) -> Batch:
  """The batch to learn next; the journal is told. At `began` the host began its turn, by `asked_at` it had chosen."""
  jax.block_until_ready(flight.rollout)
  sampled = time.perf_counter()
  landed = host_step.land(parts, pool, flight)
  record_checks.finite(landed.batch)
  graded = time.perf_counter()
  timing = {
    'timing_s/choose': asked_at - began,
    'timing_s/gen_update': sampled - asked_at,
    'timing_s/grade': graded - sampled,
    'timing_s/step': graded - began,
    'perf/throughput': landed.row['generate/tokens'] / (graded - began),
  }
  journal.landed(flight, landed, timing)
  return landed.batch


def _restore(
  parts: Parts,
  folder: Any,
  screen: Any,
  step: int | None = None,
  *,
  base: bool = False,
  trains: bool = False,
):
  """The newest whole checkpoint, that of `step`, or a fresh start: state, batch to learn, flight to land, steps.

  With `base` a fresh start, whatever there is. A run that `trains` on is measured on the held-out prompts of before.
  """
  spec = parts.spec
  found = None if base else checkpoint.latest(folder.checkpoints, step)
  batch = steps.empty_batch(spec)
  teacher = parts.teacher and parts.teacher.params
  if found is None:
    state = steps.init_state(spec, parts.model.params, teacher, parts.adapter)
    return state, batch, None, 0
  abstract = steps.without_frozen(steps.abstract_state(spec)), jax.eval_shape(lambda: batch)
  (state, batch), host = checkpoint.restore(folder.checkpoints, found, abstract)
  if host['fingerprint'] != parts.tables.train.fingerprint:
    raise UserError(
      f'the data of {folder.root} changed since step {found} (config.data); restore the files, or '
      'start another --workdir.'
    )
  held_out = parts.tables.held_out.fingerprint
  if trains and host.get('held_out', held_out) != held_out:
    raise UserError(
      f'the held-out prompts of {folder.root} changed since step {found} (config.data.eval_path, config.evaluation.prompts), '
      'so that evaluations before and after would not compare; restore them, or start another --workdir.'
    )
  for name in _HOST_STATE:
    if getattr(parts, name) is not None:
      getattr(parts, name).load_state_dict(host[name])
  screen.info(f'resuming at step {found}')
  flight = host_step.unpacked(host['flight']) if host['flight'] else None
  state = steps.with_frozen(spec, state, parts.model.params, teacher)
  return state, sharding.fetch(batch), flight, found


def _save(parts: Parts, saver: Any, done: int, state: Any, batch: Batch, flight) -> None:
  """Everything the next step depends on; PRNG and data order follow from (seed, step)."""
  host = _host_state(parts)
  tables = parts.tables
  host |= dict(
    fingerprint=tables.train.fingerprint, held_out=tables.held_out.fingerprint, step=done
  )
  host['flight'] = {} if flight is None else host_step.packed(flight)
  # For whoever finds the folder without its run.
  host |= dict(config=json.loads(parts.config.to_json()), versions=run_dir.versions())
  saver.save(done, (steps.without_frozen(state), batch), host)


def _host_state(parts: Parts) -> dict[str, Any]:
  kept = {name: getattr(parts, name) for name in _HOST_STATE}
  return {name: part.state_dict() for name, part in kept.items() if part is not None}


def _held(parts: Parts, index: int, prompts: Any, batch: Batch) -> dict[str, Any]:
  """What decides the step to come and must be the same on all processes, by names for a sentence."""
  tables, host = parts.tables, _host_state(parts)
  # The words are of a failure that this process saw.
  host['failures'] = [counts for counts, _ in host['failures']['seen']]
  data = index, tables.train.fingerprint, tables.held_out.fingerprint
  return host | dict(config=parts.config.to_json(), data=data, prompts=prompts, batch=batch)


def _evaluator(parts: Parts, pool: rewards.Pool, folder: Any, screen: Any):
  """state, step → a file of eval/; told, and kept on disk: what is there is not evaluated again."""
  if not len(parts.tables.held_out):
    logging.warning('no held-out prompts: nothing is evaluated')
    return lambda state, step: {}
  told, table = parts.config.evaluation, parts.tables.held_out
  judging = evaluate.judging_of(parts.config, pool, parts.play)
  evaluator = evaluate.make_evaluator(
    parts.spec, table, parts.model.tokenizer.decode, judging, told.samples, told.sampling
  )
  asked = evaluate.asked(parts.config, table)

  def evaluated(state: Any, step: int) -> dict[str, Any]:
    params = steps.weights(parts.spec, state)
    # A path or a name may hold other weights by now.
    of_these = asked | dict(weights=evaluate.fingerprint((params, state.judge)))
    known = folder.read_eval(step, of_these)
    if known is None:
      screen.info(f'evaluating at step {step}')
      found, rows, groups = evaluator(params, state.judge)
      known = of_these | dict(step=step, metrics=found, groups=groups, rows=rows)
      folder.write_eval(step, known)
    screen.evaluation(step, known['metrics'])
    return known

  return evaluated


def _check_trained(config: Any, workdir: str) -> None:
  """Raises UserError where `workdir` has no checkpoint: before anything is loaded or written."""
  _check_supervised(config, workdir)
  if not checkpoint.saved_steps(os.path.join(workdir, 'checkpoints')):
    raise UserError(
      f'--workdir={workdir} has no checkpoint: nothing was trained there; name the folder of a run, or give --base for '
      'config.model as it is.'
    )


def _check_supervised(config: Any, workdir: str) -> None:
  """Raises UserError where the supervised start of a run is still to come."""
  if config.sft.steps and not checkpoint.saved_steps(os.path.join(workdir, 'checkpoints')):
    raise UserError(
      f'config.sft.steps={config.sft.steps} begins a run with a supervised start, and --workdir={workdir} has no '
      'checkpoint behind one; train there first, or set --config.sft.steps=0 for config.model as it is.'
    )


def evaluate_only(
  config: Any, workdir: str, step: int | None = None, against: str = ''
) -> dict[str, float]:
  """Evaluates the newest checkpoint in `workdir` or that of `step`, or the model as loaded; prints tables.

  With `against`, the file of another evaluation, also how the two differ. Source: none.
  """
  theirs = evaluation.compare.load(against) if against else None
  config = validate.sized(config, jax.devices())
  parts = setup.parts(config)
  if not len(parts.tables.held_out):
    raise UserError(
      f'config.evaluation.prompts={config.evaluation.prompts} leaves no held-out prompt to evaluate; raise it, or give '
      'config.data.eval_path.'
    )
  if theirs is not None:
    table = parts.tables.held_out
    asked = evaluate.asked(config, table)
    evaluation.compare.check(asked['grader'], [row.id for row in table.rows], theirs)
  _check_supervised(config, workdir)
  folder = open_folder(workdir, config)
  with (
    rewards.Pool(config.rewards) as pool,
    _stage(parts),
    console.open_console(config.monitoring.console, config.steps) as screen,
  ):
    state, _, _, start = _restore(parts, folder, screen, step)
    ours = _evaluator(parts, sharded_grading.Pool(pool), folder, screen)(state, start)
  told = evaluation.tally.table(ours['groups'])
  if theirs is not None:
    told += f'\n\n{evaluation.compare.table(ours, theirs)}'
  if jax.process_index() == 0:
    print(f'\n{told}', flush=True)
  return ours['metrics']


def export_only(
  config: Any, workdir: str, to: str, dtype: str, adapter: bool = False, base: bool = False
) -> None:
  """Writes the newest checkpoint in `workdir`, or with `base` the model as loaded, as a Hugging Face folder.

  With `adapter` what LoRA trained alone, as PEFT has it. Raises UserError where nothing was trained, and without an
  adapter to write.
  """
  if not base:
    _check_trained(config, workdir)
  config = validate.sized(config, jax.devices())
  if adapter and not config.lora.rank:
    raise UserError(
      '--adapter needs a run with an adapter, and config.lora.rank=0 trains the weights themselves; leave it out.'
    )
  parts = setup.parts(config)
  folder = open_folder(workdir, config)
  with console.open_console(config.monitoring.console, config.steps) as screen:
    state, _, _, step = _restore(parts, folder, screen, base=base)
    params = sharding.fetch(state.params if adapter else steps.merged(parts.spec, state))
    if jax.process_index() == 0:
      library, what = ('peft', 'adapter') if adapter else ('transformers', 'model')
      card = export.model_card(config, step, os.path.basename(to), library)
      model = parts.model._replace(params=params)
      if adapter:
        model = model._replace(name=export.hub_name(config.model) or model.name)
        peft.save(to, model, parts.spec.model.lora, dtype=dtype, card=card)
      else:
        export.save(to, model, dtype=dtype, card=card)
      screen.info(f'{config.model if base else f"the {what} after {step} steps"} is in {to}')


def generate_only(
  config: Any, workdir: str, prompts: list[str | list[dict]], samples: int, base: bool = False
) -> None:
  """Prints answers of the newest checkpoint in `workdir`, or with `base` of the model as loaded.

  Without prompts, a conversation. Raises UserError where nothing was trained.
  """
  if not base:
    _check_trained(config, workdir)
  config = validate.sized(config, jax.devices())
  parts = setup.parts(config)
  folder = open_folder(workdir, config)
  with console.open_console(config.monitoring.console, config.steps) as screen:
    state, *_ = _restore(parts, folder, screen, base=base)
  model = parts.model._replace(params=steps.merged(parts.spec, state))
  told = dict(
    max_tokens=config.completion_tokens, chat=config.data.chat, **config.evaluation.sampling
  )
  if not prompts:
    chat.run(model, told, config.seed)
    return
  answers = rollout.stream(model, prompts, n=samples, seed=config.seed, **told)
  for prompt, texts in zip(prompts, answers, strict=True):
    print(f'> {prompt}', *texts, sep='\n', flush=True)
