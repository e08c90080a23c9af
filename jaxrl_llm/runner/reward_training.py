"""Training of a reward model on pairs of completions: data, steps, held-out accuracy, checkpoints, and the folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import logging

from jaxrl_llm import data, models
from jaxrl_llm.checkpointing import checkpoint, config_changes, metrics_log, run_dir, storage
from jaxrl_llm.config import validation
from jaxrl_llm.config.schema import Config
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.distributed import preemption, sharding
from jaxrl_llm.learner import preference_update
from jaxrl_llm.learner.preference_update import Pairs, PairSpec, State
from jaxrl_llm.models import positions, reward_model
from jaxrl_llm.monitoring import console, trackers
from jaxrl_llm.runner import memory, resume, run_logger, validate
from jaxrl_llm.types import Metrics, Model, Row, UserError

_ACCURACY = 'val-core/all/acc/pairs'  # share of the held-out pairs whose preferred completion has the higher score
# Settings that this mode does not read, and whose effect a user would miss.
_UNUSED = ('lora.rank', 'sft.steps', 'learner.minibatches', 'learner.passes', 'optimizer.outer.fn')


class Job(NamedTuple):
  """Everything that a config names, loaded."""

  config: Config
  model: Model  # without a language head
  spec: PairSpec
  train: list[Encoded]
  held_out: list[Encoded]


class Encoded(NamedTuple):
  """A pair as token ids."""

  chosen: np.ndarray
  rejected: np.ndarray
  margin: float


def run(config: ConfigLike, workdir: str, to: str, dtype: str) -> dict[str, float]:
  """Train as `config` says, continuing the run in `workdir`, and write the model to the folder `to`.

  `config.prompts` pairs a step, in a new order every epoch. Returns the last held-out metrics. Raises UserError for bad
  input before anything is compiled, and preemption.Preempted after SIGTERM, when the run is saved.
  """
  job = load(validation.sized(config, jax.devices()))
  config = job.config
  last_ids = {int(ids[-1]) for pair in job.train for ids in (pair.chosen, pair.rejected)}
  with (
    storage.training(workdir, config.checkpoint.keep) as (root, publisher),
    console.open_console(config.monitoring.console, config.steps) as screen,
    memory.exhaustion_explained(job.spec.layout.mesh, 'training', lambda: _smaller(config)),
  ):
    directory = resume.open_directory(root, config)._replace(publisher=publisher)
    state, held_out = _train(job, directory, screen)
    params = sharding.fetch(state.params)
    model = job.model._replace(params=params['decoder'])
    card = _card(job, held_out)
    head_D = params['score']['kernel']
    reward_model.save(to, model, head_D, dtype=dtype, last_ids=last_ids, card=card)
    screen.info(f'the reward model after {config.steps} steps is in {to}')
  return held_out


def _smaller(config: Config) -> str:
  """Settings with which training needs less memory."""
  tokens = config.prompt_tokens + config.completion_tokens
  return (
    f'it needs less with --config.learner.microbatch_tokens={tokens} --config.learner.remat=True, '
    'a larger config.mesh or a smaller config.model'
  )


def load(config: Config) -> Job:
  """Load pairs and model. Raises UserError for settings and data that cannot be used."""
  _check_settings(config)
  validate.validate(config)
  rows, held_out_rows = data.load_pairs(config.data, config.evaluation.prompts)
  model = models.load(config.model, scratch=config.scratch, seed=config.seed)
  limit = config.prompt_tokens + config.completion_tokens
  longest = positions.for_context(model.config, limit).max_tokens
  if limit > longest:
    raise UserError(
      f'config.prompt_tokens={config.prompt_tokens} and config.completion_tokens={config.completion_tokens} are '
      f'{limit} together, and config.model={config.model!r} reads {longest}; lower one of them.'
    )
  model = reward_model.without_language_head(model)
  spec = preference_update.make_spec(
    config, model.config, sharding.make_mesh(config.mesh.to_dict())
  )
  train = _encoded(rows, model, limit)
  if not train:
    raise UserError(
      f'config.data.path={config.data.path!r} has no pair of at most {limit} tokens, config.prompt_tokens + '
      'config.completion_tokens; raise these.'
    )
  return Job(config, model, spec, train, _encoded(held_out_rows, model, limit))


def _check_settings(config: Config) -> None:
  """Raises UserError for settings that this mode cannot honor."""
  settings, defaults = (config_changes.flatten(json.loads(c.to_json())) for c in (config, Config()))
  for name in _UNUSED:
    if settings[name] != defaults[name]:
      raise UserError(
        f'config.{name}={settings[name]!r} has no effect with --mode=reward_model, which trains all weights on pairs '
        f'alone; set --config.{name}={defaults[name]}.'
      )
  if not config.steps:
    raise UserError('config.steps=0 trains nothing with --mode=reward_model; set at least 1.')
  if jax.process_count() > 1:
    raise UserError(
      f'--mode=reward_model runs in one process, and there are {jax.process_count()}; start one.'
    )


def _encoded(rows: Sequence[Row], model: Model, limit: int) -> list[Encoded]:
  """The pairs as the reward model will score them; those with more than `limit` tokens on a side are left out."""
  pairs = []
  for row in rows:
    prompt = list(row.messages) or row.question
    texts = (
      reward_model.conversation(model.tokenizer, prompt, row.extra[side])
      for side in ('chosen', 'rejected')
    )
    chosen, rejected = (np.asarray(model.tokenizer.encode(text), np.int32) for text in texts)
    if 0 < min(len(chosen), len(rejected)) and max(len(chosen), len(rejected)) <= limit:
      pairs.append(Encoded(chosen, rejected, row.extra['margin']))
  if len(pairs) < len(rows):
    logging.warning(
      '%d of %d pairs are left out: more than %d tokens on a side, config.prompt_tokens + config.completion_tokens.',
      len(rows) - len(pairs), len(rows), limit,
    )  # fmt: skip
  return pairs


def batch(job: Job, index: int) -> Pairs:
  """The pairs of step `index`: every pair once an epoch, in an order drawn from (seed, epoch)."""
  size, count = job.config.prompts, len(job.train)
  places = range(index * size, (index + 1) * size)
  epochs = {place // count for place in places}
  orders = {e: np.random.default_rng((job.config.seed, e)).permutation(count) for e in epochs}
  return _stacked([job.train[orders[place // count][place % count]] for place in places])


def _stacked(pairs: Sequence[Encoded]) -> Pairs:
  rows = [ids for pair in pairs for ids in (pair.chosen, pair.rejected)]
  width = reward_model.padded_tokens(rows)
  tokens_BxS, length_B = data.pad_rows(rows, width)
  margin_N = np.array([pair.margin for pair in pairs], np.float32)
  return Pairs(tokens_BxS.reshape(-1, 2, width), length_B.reshape(-1, 2), margin_N)


def _train(
  job: Job, directory: run_dir.RunDirectory, screen: console.Console
) -> tuple[State, dict[str, float]]:
  """(the state after all steps, the metrics of the last evaluation)."""
  config, update = job.config, preference_update.compile_update(job.spec)
  state, start = _restore(job, directory, screen)
  with (
    preemption.PreemptionHandler() as handler,
    checkpoint.Saver(
      directory.checkpoints, config.checkpoint.keep, directory.record_checkpoint
    ) as saver,
    trackers.Trackers(
      config.monitoring.trackers, directory.root, config, start, screen.warn
    ) as copies,
    metrics_log.Writer(directory.metrics, start, on_row=copies.log) as log,
  ):
    evaluate = _evaluator(job, directory, screen, copies)
    if start == 0:
      with handler.interruptible():
        evaluate(state, 0)
    for index in range(start, config.steps):
      began, done = time.perf_counter(), index + 1
      state, metrics = update(state, batch(job, index))
      row = _row(job, index, metrics) | {'timing_s/step': time.perf_counter() - began}
      log.write(row)
      screen.step(row)
      run_logger.check_skipped(row, config)
      if handler.requested or done % config.checkpoint.every == 0 or done == config.steps:
        saver.save(done, state, _host_state(job, done))
      if handler.requested:
        raise preemption.Preempted
      if config.evaluation.every and done % config.evaluation.every == 0 and done < config.steps:
        evaluate(state, done)
    saver.wait()
    with handler.interruptible():
      return state, evaluate(state, config.steps)


def _row(job: Job, index: int, metrics: Metrics) -> dict[str, float]:
  """A row of metrics.jsonl."""
  row = {name: float(value) for name, value in metrics.items()}
  return row | {metrics_log.STEP: index, 'actor/lr': float(job.spec.schedule(index))}


def _evaluator(
  job: Job,
  directory: run_dir.RunDirectory,
  screen: console.Console,
  copies: trackers.Trackers,
) -> Callable[[State, int], dict[str, float]]:
  """A function of (state, steps done) that scores the held-out pairs, writes eval/ and returns the metrics."""
  score = preference_update.compile_scores(job.spec)
  size = job.config.prompts

  def evaluate(state: State, done: int) -> dict[str, float]:
    if not job.held_out:
      return {}
    scores = []
    for first in range(0, len(job.held_out), size):
      part = job.held_out[first : first + size]
      filled = part + part[:1] * (size - len(part))
      scores.append(np.asarray(score(state.params, _stacked(filled)))[: len(part)])
    score_Nx2 = np.concatenate(scores)
    gap_N = score_Nx2[:, 0] - score_Nx2[:, 1]
    metrics = {
      _ACCURACY: float((gap_N > 0).mean()),
      'val-aux/pairs/margin': float(gap_N.mean()),
    }
    directory.write_eval(done, dict(step=done, pairs=len(gap_N), metrics=metrics))
    screen.evaluation(done, metrics)
    copies.log(done, metrics)
    return metrics

  return evaluate


def _restore(
  job: Job, directory: run_dir.RunDirectory, screen: console.Console
) -> tuple[State, int]:
  """(state, steps done) of the newest checkpoint, or of a fresh start. Raises UserError where the pairs changed."""
  newest = checkpoint.latest(directory.checkpoints)
  if newest is None:
    return preference_update.init_state(job.spec, job.model.params, job.config.seed), 0
  abstract = preference_update.abstract_state(job.spec)
  state, host = checkpoint.restore(directory.checkpoints, newest, abstract)
  if host['fingerprint'] != _fingerprint(job):
    raise UserError(
      f'the pairs of {directory.root} changed since step {newest} (config.data); restore the files, or start another '
      '--workdir.'
    )
  screen.info(f'resuming at step {newest}')
  return state, newest


def _host_state(job: Job, done: int) -> dict:
  config = json.loads(job.config.to_json())
  versions = run_dir.versions()
  return dict(step=done, fingerprint=_fingerprint(job), config=config, versions=versions)


def _fingerprint(job: Job) -> str:
  """A hash of all training pairs, which a run resumes with."""
  digest = hashlib.sha256()
  for pair in job.train:
    digest.update(f'{len(pair.chosen)} {len(pair.rejected)} {pair.margin!r}'.encode())
    digest.update(pair.chosen.tobytes() + pair.rejected.tobytes())
  return digest.hexdigest()


def _card(job: Job, held_out: dict[str, float]) -> str:
  """The README.md of the exported folder."""
  config = job.config
  parts = (
    '---\nlibrary_name: transformers\npipeline_tag: text-classification\ntags: [reward-model, jaxrl_llm]\n---',
    f'`{config.model}` as a reward model after {config.steps} steps of {config.prompts} pairs of '
    f'`{config.data.path}`, with the Bradley–Terry loss (jaxrl_llm).',
    f'{held_out[_ACCURACY]:.1%} of {len(job.held_out)} held-out pairs are right.'
    if held_out
    else '',
    'The score is that of the last token of the conversation, without an end token behind plain text.',
    f'The whole configuration:\n\n```json\n{config.to_json(indent=2, sort_keys=True)}\n```',
  )
  return '\n\n'.join(part for part in parts if part) + '\n'
