"""The workers of step_time.py, one process per side, and the folder that both read.

step_workers.py prepare FOLDER 0|1 SHAPE... | trl FOLDER SHAPE MICROBATCH | ours FOLDER SHAPE [config override]...
step_workers.py logits FOLDER SHAPE

The worker of Tunix, which needs another environment, is tunix_step.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import random
import resource
import sys
import time

import numpy as np

from tests.bench.lib import step_shapes, trl_jobs
from tests.bench.lib.step_shapes import FORCED, FULL, NATURAL, Job, Shape


def cpu_seconds() -> float:
  used = resource.getrusage(resource.RUSAGE_SELF)
  return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def timed(row: dict, name: str):
  """Adds `name`_wall_s and `name`_cpu_s, of all threads of this process, to `row`."""
  wall, cpu = time.perf_counter(), cpu_seconds()
  yield
  row[f'{name}_wall_s'] = time.perf_counter() - wall
  row[f'{name}_cpu_s'] = cpu_seconds() - cpu


def peak_gib() -> float:
  """The peak memory of this process since the last `forget_peak`, in GiB."""
  with contextlib.suppress(OSError):
    for line in pathlib.Path('/proc/self/status').read_text().splitlines():
      if line.startswith('VmHWM:'):
        return int(line.split()[1]) / 2**20
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def forget_peak() -> None:
  with contextlib.suppress(OSError):  # Linux only; elsewhere the peak covers the whole process
    pathlib.Path('/proc/self/clear_refs').write_text('5')


class CommandPipe:
  """The worker's end of the pipe: one command per line in, one JSON row per line out."""

  def __init__(self):
    self._out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # output of libraries must not mix with the rows

  def wait(self) -> str:
    command = sys.stdin.readline().strip() or 'stop'
    if command == 'forget':
      forget_peak()
      self.reply({})
      return self.wait()
    return command

  def reply(self, row: dict) -> None:
    print(json.dumps(row | {'peak_gib': peak_gib()}), file=self._out, flush=True)


# Weights and prompts for both sides.


def prepare(folder: pathlib.Path, tiny: str, *names: str) -> None:
  """Writes FOLDER/model, and SHAPE.json for each shape; tiny=1: a small model of random weights."""
  is_tiny = tiny == '1'
  tokenizer = trl_jobs.export_model(folder, is_tiny).tokenizer
  for name in names:
    shape = step_shapes.shape(name, is_tiny)
    if shape.lengths == NATURAL:
      prompts, ids = job_prompts('tiny' if is_tiny else shape.config, tokenizer, shape)
    else:
      prompts, ids = exact_prompts(tokenizer, shape)
    trl_jobs.check_token_ids(folder, prompts, ids)
    job = Job(
      shape=shape,
      end_ids=tuple(tokenizer.end_ids),
      prompts=prompts,
      ids=ids,
      mixed=step_shapes.mixed_groups(len(prompts), shape.mixed),
      lengths=step_shapes.forced_lengths(shape, len(prompts)) if shape.lengths == FORCED else [],
    )
    step_shapes.write_job(folder / f'{name}.json', job)


def write_logits(folder: pathlib.Path, name: str) -> None:
  """Writes SHAPE_logits.npz: this program's logits on the prompts of the first step, for a comparison."""
  from jaxrl_llm import models
  from jaxrl_llm.models import decoder

  model, job = models.load(str(folder / 'model')), step_shapes.read_job(folder / f'{name}.json')
  tokens_PxL, length_P = job.prompt_tokens(job.step_prompts(0))
  mask_PxL = np.arange(tokens_PxL.shape[1]) < length_P[:, None]
  logits_PxLxV = decoder.forward(model.config, model.params, tokens_PxL, mask_PxL)
  np.savez(
    folder / f'{name}_logits.npz',
    tokens_PxL=tokens_PxL,
    mask_PxL=mask_PxL,
    logits_PxLxV=np.asarray(logits_PxLxV),
  )


def job_prompts(config_name: str, tokenizer, shape: Shape) -> tuple[list, list[list[int]]]:
  """The first prompts of a config's training set, as (text or messages, token ids)."""
  from jaxrl_llm import data
  from jaxrl_llm.config import loading, schema

  overrides = [f'--config.prompt_tokens={shape.prompt_tokens}']
  config = schema.typed(loading.load(config_name, overrides))
  table = data.load(config, tokenizer).train
  count = min(len(table), shape.prompts * step_shapes.STEPS)
  prompts = [data.render(row, config.data) for row in table.rows[:count]]
  return prompts, [ids.tolist() for ids in table.tokens[:count]]


def exact_prompts(tokenizer, shape: Shape) -> tuple[list, list[list[int]]]:
  """Texts of exactly L tokens, the same in every run: sums as word problems, truncated."""
  rng, L = random.Random(0), shape.prompt_tokens
  prompts, token_ids = [], []
  while len(prompts) < shape.prompts * step_shapes.STEPS:
    text = ''
    while len(tokenizer.encode(text)) <= L:
      name = rng.choice(('Ada', 'Ben', 'Cleo', 'Dan'))
      thing = rng.choice(('apples', 'pens', 'cups'))
      text += f'{name} has {rng.randint(2, 99)} {thing} and gives {rng.randint(2, 9)} away. '
    text = tokenizer.decode(tokenizer.encode(text)[:L])
    ids = tokenizer.encode(text)
    if len(ids) == L:
      prompts.append(text)
      token_ids.append(list(ids))
  return prompts, token_ids


# TRL.


def trl_worker(folder: pathlib.Path, name: str, microbatch: str) -> None:
  """Runs TRL's own training loop, which waits for a command before every step."""
  pipe = CommandPipe()
  import datasets
  import torch

  job = step_shapes.read_job(folder / f'{name}.json')
  row: dict = {}
  model, tokenizer = trl_jobs.load_trl_model(folder)
  rows = [dict(prompt=prompt, number=i) for i, prompt in enumerate(job.prompts)]
  trainer_type, callback = trl_types(pipe, job, row)
  trainer = trainer_type(
    model=model,
    processing_class=tokenizer,
    train_dataset=datasets.Dataset.from_list(rows),
    reward_funcs=functools.partial(trl_reward, job),
    args=step_config(folder, job, int(microbatch)),
    callbacks=[callback],
  )
  callback.trainer = trainer
  # Without lengths of their own, rows are not truncated at end tokens after sampling either.
  trainer.eos_token_ids = [-1] if job.shape.lengths == FULL else list(job.end_ids)
  pipe.reply({'threads': torch.get_num_threads()})
  trainer.train()


def trl_reward(job: Job, completions, number, **_) -> list[float]:
  """The rewards of a generation batch: the rollouts of a group follow one another."""
  return [
    job.reward(prompt, i % job.shape.rollouts, trl_jobs.text_of(completion))
    for i, (prompt, completion) in enumerate(zip(number, completions, strict=True))
  ]


def step_config(folder: pathlib.Path, job: Job, microbatch: int):
  """TRL's settings of a shape."""
  shape = job.shape
  return trl_jobs.grpo_config(
    folder,
    shape.prompts * shape.rollouts,
    microbatch,
    max_steps=10**6,
    num_generations=shape.rollouts,
    max_completion_length=shape.completion_tokens,
    generation_kwargs={'eos_token_id': None if shape.lengths == FULL else list(job.end_ids)},
    learning_rate=1e-6,
    lr_scheduler_type='constant',
    shuffle_dataset=False,
    **shape.trl,
  )


def trl_types(pipe: CommandPipe, job: Job, row: dict):
  """(a GRPOTrainer that times its rollouts, a callback that runs one step per command); both write into `row`."""
  import transformers
  import trl

  class Trainer(trl.GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
      numbers = [x['number'] for x in inputs]
      with timed(row, 'rollout'):
        with forced_ends(self.model, job, numbers[:: job.shape.rollouts]):
          out = super()._generate_and_score_completions(inputs)
      row['tokens'] = int(out['completion_mask'].sum())
      row['mixed'] = int((out['advantages'].view(-1, job.shape.rollouts) != 0).any(1).sum())
      return out

  class OneStepPerCommand(transformers.TrainerCallback):
    trainer = None

    def on_step_begin(self, args, state, control, **kwargs):
      if pipe.wait() == 'stop':
        os._exit(0)  # within TRL's loop; nothing is left to save
      self.step = timed(row, 'step')
      self.step.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
      self.step.__exit__(None, None, None)
      row['update_wall_s'] = row['step_wall_s'] - row['rollout_wall_s']
      row['update_cpu_s'] = row['step_cpu_s'] - row['rollout_cpu_s']
      row['entropy'] = self.trainer._metrics['train']['entropy'][-1]
      pipe.reply(row)

  return Trainer, OneStepPerCommand()


@contextlib.contextmanager
def forced_ends(model, job: Job, index_P):
  """Within it, `model.generate` ends each row at the length of its prompt and rollout, if the shape has lengths."""
  if job.shape.lengths != FORCED:
    yield
    return
  import torch

  cap_B, ends, original = torch.tensor(job.caps(index_P)), list(job.end_ids), model.generate
  sampled = 0

  def force(input_ids, scores):
    nonlocal sampled
    sampled += 1
    scores = scores.clone()
    scores[:, ends] = -torch.inf
    over_B = cap_B == sampled
    scores[over_B] = -torch.inf
    scores[over_B, ends[0]] = 0.0
    return scores

  model.generate = functools.partial(original, logits_processor=[force])
  try:
    yield
  finally:
    del model.generate  # the method of the class is visible again


# This program.


def ours_worker(folder: pathlib.Path, name: str, *overrides: str) -> None:
  """Runs the compiled step; `split` times its two halves as separate programs."""
  from jaxrl_llm.distributed import host_memory

  host_memory.keep_freed()  # as the command line does
  pipe = CommandPipe()
  stepper = Stepper(folder, step_shapes.read_job(folder / f'{name}.json'), overrides)
  pipe.reply({'threads': os.cpu_count()})
  while (command := pipe.wait()) != 'stop':
    pipe.reply(stepper.step() if command == 'step' else stepper.split())


class Stepper:
  """The train state and the compiled programs of a shape.

  `step` and `split` go through the prompts independently of each other, so that the n-th call of each has those of
  TRL's n-th step.
  """

  def __init__(self, folder: pathlib.Path, job: Job, overrides: tuple[str, ...] = ()):
    from jaxrl_llm import models, step
    from jaxrl_llm.learner import compile as programs
    from jaxrl_llm.learner import empty_records
    from jaxrl_llm.learner import state as train_state

    self.job, model = job, models.load(str(folder / 'model'))
    self.tokenizer = model.tokenizer
    self.spec = step_spec(job, model, overrides)
    self.state = train_state.init_state(self.spec, model.params)
    self.batch = empty_records.empty_batch(self.spec)
    self.fused = step.compile_step(self.spec)
    self.update = programs.compile_update(self.spec)
    self.sample = programs.compile_sample(self.spec)
    self.count = {'step': 0, 'split': 0}

  def step(self) -> dict:
    """One step: update on the batch of the call before, sample, decode to text, grade."""
    row, (prompts, cap_B) = {}, self._inputs('step')
    with timed(row, 'step'):
      self.state, rollout, metrics = self.fused(self.state, self.batch, prompts, None, None, cap_B)
      self.batch = self._graded(prompts, rollout)
      metrics = {k: float(v) for k, v in metrics.items()}
    return row | self._facts(metrics, self.batch)

  def split(self) -> dict:
    """The same work as two programs: sample, decode and grade; then update on that batch."""
    row = {}
    with timed(row, 'rollout'):
      batch = self.sampled()
    counts = self._facts({}, batch)  # the batch is donated to the update
    with timed(row, 'update'):
      metrics = self.learn(batch)
    return row | counts | {'entropy': float(metrics['actor/entropy'])}

  def sampled(self):
    """The graded batch of the next prompts, from the program that only samples."""
    prompts, cap_B = self._inputs('split')
    state = self.state._replace(carried=())
    rollout, _, carried = self.sample(state, self.state.carried, prompts, None, None, cap_B)
    self.state = self.state._replace(carried=carried)
    return self._graded(prompts, rollout)

  def learn(self, batch) -> dict:
    """The metrics of the program that only updates; waits for it."""
    import jax

    self.state, metrics = jax.block_until_ready(self.update(self.state, batch))
    return metrics

  def _inputs(self, command: str):
    """(prompts, cap of each row) of the next call of `command`."""
    from jaxrl_llm.types import Prompts

    shape, number = self.job.shape, self.count[command]
    self.count[command] += 1
    index_P = self.job.step_prompts(number)
    tokens_PxL, length_P = self.job.prompt_tokens(index_P)
    born_P = np.full_like(index_P, number)
    cap = self.job.caps(index_P) if shape.lengths == FORCED else np.int32(shape.completion_tokens)
    return Prompts(tokens_PxL, length_P, index_P, born_P, np.zeros(len(index_P), np.float32)), cap

  def _graded(self, prompts, rollout):
    """The batch of a rollout: tokens are decoded to text, and the texts graded."""
    import jax

    from jaxrl_llm.types import Batch

    rollout, G = jax.tree.map(np.asarray, rollout), self.job.shape.rollouts
    rows = zip(rollout.tokens_BxT.tolist(), rollout.length_B, strict=True)
    texts = [self.tokenizer.decode(tokens[:n]) for tokens, n in rows]
    numbers = [(int(prompts.index_P[b // G]), b % G) for b in range(len(texts))]
    rewards = [self.job.reward(*n, text) for n, text in zip(numbers, texts, strict=True)]
    reward_B = np.array(rewards, np.float32)
    return Batch(prompts, rollout, reward_B, (reward_B > 0.5).astype(np.float32))

  def _facts(self, metrics: dict, batch) -> dict:
    reward_PxG = batch.reward_B.reshape(-1, self.job.shape.rollouts)
    row = {'tokens': int(batch.rollout.length_B.sum())}
    row['mixed'] = int((np.ptp(reward_PxG, axis=1) > 0).sum())
    return row | ({'entropy': metrics['actor/entropy']} if metrics else {})


def step_spec(job: Job, model, overrides: tuple[str, ...] = ()):
  """The StepSpec of a shape in float32 with a constant learning rate."""
  from jaxrl_llm.config import loading
  from jaxrl_llm.distributed import sharding
  from jaxrl_llm.learner.spec_from_config import make_spec

  shape = job.shape
  fixed = (
    f'prompts={shape.prompts}',
    f'rollouts={shape.rollouts}',
    f'prompt_tokens={shape.prompt_tokens}',
    f'completion_tokens={shape.completion_tokens}',
    'dtype=float32',
    'optimizer.learning_rate=1e-6',
    'optimizer.decay=constant',
  )
  lines = [f'--config.{x}' for x in (*fixed, *overrides)]
  config = loading.load(shape.config, lines)
  end_ids = job.end_ids if shape.lengths == NATURAL else ()
  mesh = sharding.make_mesh(config.mesh)
  return make_spec(config, model.config, end_ids, mesh, model.tokenizer.token_texts)


def main(name: str, folder: str, *options: str) -> None:
  commands = dict(prepare=prepare, logits=write_logits, trl=trl_worker, ours=ours_worker)
  commands[name](pathlib.Path(folder), *options)


if __name__ == '__main__':
  main(*sys.argv[1:])
