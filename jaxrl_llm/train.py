"""The host loop, in reading order: set up, evaluate, then propose → step → grade → observe, and save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from jaxrl_llm import (
  checkpoint,
  console,
  control,
  data,
  evaluate,
  generate,
  grade,
  metrics,
  models,
  replay,
  shard,
  warmstart,
)
from jaxrl_llm import (
  config as configs,
)
from jaxrl_llm import (
  step as steps,
)
from jaxrl_llm import (
  workdir as workdirs,
)
from jaxrl_llm.generate import cap as caps
from jaxrl_llm.program import Program, check_rows, make_program
from jaxrl_llm.types import REASONS, TRUNCATED, Batch, Prompts, Rollout, UserError

_HOST_STATE = (
  'curriculum',
  'lengths',
  'unfinished',
  'drafts',
)  # what the checkpoint keeps of the host


class _Parts(NamedTuple):
  """What a run is made of, all checked before anything is compiled."""

  config: Any
  model: Any
  mesh: jax.sharding.Mesh
  program: Program
  tables: data.Tables
  curriculum: control.Curriculum
  lengths: control.LengthEstimate
  unfinished: replay.Unfinished
  drafts: replay.Drafts
  cap: Callable[..., int]  # (step, T) → tokens a row may take


def run(config: Any, workdir: str, mesh: jax.sharding.Mesh | None = None) -> dict[str, float]:
  """Trains as `config` says inside `workdir`, and resumes what lies there. Returns the last evaluation.

  `mesh` overrides `config.mesh`. Raises UserError for bad input, before compiling. Source: none.
  """
  config = configs.sized(config, jax.devices() if mesh is None else mesh.devices.flatten().tolist())
  parts = _parts(config, mesh)
  folder = workdirs.open_run(workdir, config)
  with grade.Pool(config.grade) as pool, console.Console(config.steps) as screen:
    return _loop(parts, folder, pool, screen)


def _parts(config: Any, mesh: jax.sharding.Mesh | None) -> _Parts:
  configs.validate(config)
  grade.resolve(config.grade)
  mesh = mesh or shard.make_mesh(config.mesh)
  check_rows(config, mesh)
  model = models.load(config.model, scratch=config.scratch, seed=config.seed)
  tables = data.load(config, model.tokenizer)
  if config.prompts > len(tables.train):
    raise UserError(
      f'config.prompts={config.prompts} is more than the {len(tables.train)} prompts of the data; '
      'lower it, or raise config.data.size.'
    )
  program = make_program(config, model.config, model.tokenizer.end_ids, mesh)
  curriculum = control.Curriculum(
    config.curriculum,
    len(tables.train),
    group=config.rollouts,
    seed=config.seed,
    kind=data.kinds(tables.train.rows),
  )
  lengths = control.LengthEstimate(len(tables.train))
  unfinished = replay.Unfinished(config.rollouts, config.generate.max_age)
  drafts = replay.Drafts(config.rollouts)
  cap = configs.pick(caps, config.generate.cap, 'generate.cap')
  cap(0, config.completion_tokens)
  return _Parts(config, model, mesh, program, tables, curriculum, lengths, unfinished, drafts, cap)


def _loop(parts: _Parts, folder: Any, pool: grade.Pool, screen: Any) -> dict[str, float]:
  config, program = parts.config, parts.program
  state, batch, start = _restore(parts, folder, screen)
  if start == 0 and config.sft.steps:
    screen.say(f'supervised warm start, {config.sft.steps} steps')
    state, losses = warmstart.run(config, program, state, parts.tables.train, parts.model.tokenizer)
    screen.say(f'warm start: loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per token')
  evaluator = _evaluator(parts, pool)
  if start == 0:
    _evaluate(evaluator, state.params, folder, 0, screen)
  step_fn = steps.compile_step(program)
  screen.say('compiling the step (update and generation in one program)')
  with metrics.Writer(folder.metrics, start) as writer:
    for index in range(start, config.steps):
      began = time.perf_counter()
      prompts, begun, draft = _propose(parts, index)
      cap = np.int32(parts.cap(index, config.completion_tokens))
      state, rollout, device = step_fn(state, batch, prompts, begun, draft, cap)
      rollout = jax.tree.map(np.asarray, rollout)
      sampled = time.perf_counter()
      rollout, whole_P, held = _hold(parts, prompts, rollout, index)
      batch, rows, texts, counts = _grade(parts, pool, prompts, rollout)
      graded = time.perf_counter()
      observed = _observe(parts, batch, whole_P)
      row = {'training/global_step': index} | {k: float(v) for k, v in device.items()}
      row |= observed | counts | held | _rollout_metrics(batch)
      row |= {
        'timing_s/gen_update': sampled - began,
        'timing_s/grade': graded - sampled,
        'timing_s/step': time.perf_counter() - began,
        'perf/throughput': float(rollout.length_B.sum()) / (sampled - began),
      }
      _check(row, config)
      writer.write(row)
      screen.step(row)
      if index % config.rollouts_every == 0:
        folder.write_rollouts(index, _rollout_rows(rows, texts, batch, index))
      if config.eval.every and (index + 1) % config.eval.every == 0 and index + 1 < config.steps:
        _evaluate(evaluator, state.params, folder, index + 1, screen)
      if (index + 1) % config.checkpoint.every == 0 or index + 1 == config.steps:
        _save(parts, folder, index + 1, state, batch)
  final = _evaluate(evaluator, state.params, folder, config.steps, screen)
  screen.finish(folder.root)
  return final


def _restore(parts: _Parts, folder: Any, screen: Any):
  """The newest whole checkpoint, or a fresh start: state, pending batch, number of steps done."""
  program = parts.program
  found = checkpoint.latest(folder.checkpoints)
  batch = steps.empty_batch(program)
  if found is None:
    return steps.init_state(program, parts.model.params), batch, 0
  abstract = steps.abstract_state(program), jax.eval_shape(lambda: batch)
  (state, batch), host = checkpoint.restore(folder.checkpoints, found, abstract)
  if host['fingerprint'] != parts.tables.train.fingerprint:
    raise UserError(
      f'the data of {folder.root} changed since step {found} (config.data); restore the files, or '
      'start another --workdir.'
    )
  for name in _HOST_STATE:
    getattr(parts, name).load_state_dict(host[name])
  screen.say(f'resuming at step {found}')
  return state, jax.tree.map(np.asarray, batch), found


def _save(parts: _Parts, folder: Any, done: int, state: Any, batch: Batch) -> None:
  """Everything the next step depends on; PRNG and data order follow from (seed, step)."""
  host = {name: getattr(parts, name).state_dict() for name in _HOST_STATE}
  host |= dict(fingerprint=parts.tables.train.fingerprint, step=done)
  checkpoint.save(folder.checkpoints, done, (state, batch), host, keep=parts.config.checkpoint.keep)


def _evaluator(parts: _Parts, pool: grade.Pool):
  if not len(parts.tables.held_out):
    logging.warning('no held-out prompts: nothing is evaluated')
    return None
  return evaluate.make_evaluator(
    parts.program,
    parts.tables.held_out,
    parts.model.tokenizer.decode,
    pool,
    parts.config.eval.samples,
    parts.config.eval.sampling,
  )


def _evaluate(evaluator: Any, params: Any, folder: Any, step: int, screen: Any) -> dict[str, float]:
  """Evaluates once per step number: a finished evaluation on disk is not repeated."""
  if evaluator is None:
    return {}
  known = folder.read_eval(step)
  if known is None:
    screen.say(f'evaluating at step {step}')
    known, rows = evaluator(params)
    folder.write_eval(step, known, rows)
  screen.evaluation(step, known)
  return known


def _hold(parts: _Parts, prompts: Prompts, rollout: Rollout, index: int):
  """Keeps what goes on next step and what may be a draft; returns the rollout without the unfinished groups."""
  whole_P, dropped = parts.unfinished.keep(prompts, rollout, index)
  rollout = replay.blank(rollout, np.repeat(whole_P, parts.config.rollouts))
  if parts.config.generate.draft.fn != 'none':
    parts.drafts.keep(prompts.index_P, rollout)
  held = len(parts.unfinished)
  told = {'generate/unfinished_groups': held, 'generate/dropped_groups': dropped}
  return rollout, whole_P, told


def _grade(parts: _Parts, pool: grade.Pool, prompts: Prompts, rollout: Rollout):
  """The batch to learn from, with rows and texts for the log; empty rows are not graded and get 0."""
  decode, table = parts.model.tokenizer.decode, parts.tables.train
  texts = [
    decode(t[:n].tolist()) for t, n in zip(rollout.tokens_BxT, rollout.length_B, strict=True)
  ]
  rows = [table.rows[i] for i in prompts.index_P for _ in range(parts.config.rollouts)]
  real = np.flatnonzero(rollout.length_B)
  scores = pool.score([rows[b] for b in real], [texts[b] for b in real])
  reward_B = np.zeros(len(rows), np.float32)
  reward_B[real] = scores.reward_B
  batch = Batch(prompts, rollout, reward_B, (reward_B >= 1).astype(np.float32))
  return batch, rows, texts, scores.counts


def _propose(parts: _Parts, index: int) -> tuple[Prompts, Rollout | None, Rollout | None]:
  """The groups to continue, then as many new prompts as there is room for; and drafts for these."""
  config, held = parts.config, parts.unfinished
  chosen = parts.curriculum.propose(index, config.prompts).index
  if len(held):  # one prompt may not run twice at once
    chosen = chosen[~np.isin(chosen, held.prompts.index_P)][: config.prompts - len(held)]
  fresh = parts.tables.train.prompts(chosen, born=index)
  fresh = fresh._replace(expected_P=parts.lengths(chosen))
  empty, begun = steps.empty_rollout(parts.program), None
  if config.generate.stop.fn != 'none':
    fresh, begun = held.begin(fresh, empty)
  drafts = config.generate.draft.fn != 'none'
  return fresh, begun, parts.drafts.take(fresh.index_P, empty) if drafts else None


def _observe(parts: _Parts, batch: Batch, whole_P: np.ndarray) -> dict[str, float]:
  """Tells the curriculum how many of each whole group were right; integers only."""
  per_prompt = lambda x: x.reshape(-1, parts.config.rollouts)[whole_P]  # noqa: E731
  index = np.asarray(batch.prompts.index_P)[whole_P]
  right = per_prompt(batch.correct_B).sum(1).astype(np.int32)
  truncated = per_prompt(batch.rollout.reason_B == TRUNCATED).sum(1).astype(np.int32)
  if len(index):
    parts.curriculum.observe(index, right, np.full_like(right, parts.config.rollouts), truncated)
    parts.lengths.observe(index, per_prompt(batch.rollout.length_B).mean(1))
  return parts.curriculum.metrics()


def _rollout_metrics(batch: Batch) -> dict[str, float]:
  real_B = batch.rollout.length_B > 0
  if not real_B.any():
    return {'perf/rollouts': 0, 'response_length/sum': 0}
  length_B, reward_B = batch.rollout.length_B[real_B], batch.reward_B[real_B]
  return {
    'critic/score/mean': float(reward_B.mean()),
    'critic/score/max': float(reward_B.max()),
    'critic/score/min': float(reward_B.min()),
    'response_length/sum': int(length_B.sum()),
    'response_length/mean': float(length_B.mean()),
    'response_length/max': float(length_B.max()),
    'response_length/min': float(length_B.min()),
    'response_length/clip_ratio': float((batch.rollout.reason_B == TRUNCATED)[real_B].mean()),
    'prompt_length/mean': float(batch.prompts.length_P.mean()),
    'perf/rollouts': int(real_B.sum()),
  }


def _rollout_rows(rows, texts, batch: Batch, index: int) -> list[dict]:
  G = len(texts) // len(batch.prompts.index_P)
  return [
    dict(
      input=row.question or row.messages,
      output=text,
      gts=row.answer,
      score=float(batch.reward_B[b]),
      step=index,
      prompt=int(batch.prompts.index_P[b // G]),
      length=int(batch.rollout.length_B[b]),
      reason=REASONS[int(batch.rollout.reason_B[b])],
    )
    for b, (row, text) in enumerate(zip(rows, texts, strict=True))
    if batch.rollout.length_B[b]
  ]


def _check(row: dict[str, float], config: Any) -> None:
  skipped = row['actor/skipped_updates']
  if skipped >= config.optimizer.max_skipped:
    raise UserError(
      f'config.optimizer.max_skipped={config.optimizer.max_skipped} updates in a row had a non-finite '
      'gradient; lower config.optimizer.learning_rate and restart from the last checkpoint.'
    )


def evaluate_only(config: Any, workdir: str) -> dict[str, float]:
  """Evaluates the newest checkpoint in `workdir`, or the model as loaded. Source: none."""
  config = configs.sized(config, jax.devices())
  parts = _parts(config, None)
  folder = workdirs.open_run(workdir, config)
  with grade.Pool(config.grade) as pool, console.Console(config.steps) as screen:
    state, _, start = _restore(parts, folder, screen)
    return _evaluate(_evaluator(parts, pool), state.params, folder, start, screen)


def generate_only(config: Any, workdir: str, prompts: list[str | list[dict]], samples: int) -> None:
  """Prints answers of the newest checkpoint in `workdir`, or of the model as loaded. Source: none."""
  config = configs.sized(config, jax.devices())
  parts = _parts(config, None)
  folder = workdirs.open_run(workdir, config)
  with console.Console(config.steps) as screen:
    state, _, _ = _restore(parts, folder, screen)
  model = parts.model._replace(params=state.params)
  answers = generate.stream(
    model,
    prompts,
    n=samples,
    max_tokens=config.completion_tokens,
    seed=config.seed,
    chat=config.data.chat,
    **config.eval.sampling,
  )
  for prompt, texts in zip(prompts, answers, strict=True):
    print(f'> {prompt}', *texts, sep='\n', flush=True)
