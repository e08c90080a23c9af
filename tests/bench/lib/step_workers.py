"""The workers of step_time.py, one process per side, and the folder that both read.

step_workers.py prepare FOLDER 0|1 | trl FOLDER MICROBATCH | ours FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import resource
import sys
import time
import zlib

P, G, L, T = 4, 8, 64, 32
STEPS = 64  # steps' worth of different prompts; the sides walk through them in the same order


def reward(text: str) -> float:
  """A hash in [0, 1) of a text: any two rollouts differ, so that every group is mixed."""
  return zlib.crc32(text.encode()) / 2**32


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


def prepare(folder: pathlib.Path, tiny: int) -> None:
  """Writes FOLDER/model, which both sides load, and prompts.json; tiny=1: a small model of random weights."""
  import transformers

  from jaxrl_llm import models
  from jaxrl_llm.config import loading
  from jaxrl_llm.models import default_model, export

  scratch = loading.default().scratch
  model = models.load('scratch', scratch=scratch) if tiny else models.load(default_model.NAME)
  export.save(str(folder / 'model'), model, dtype='float32')
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder / 'model')
  (folder / 'prompts.json').write_text(json.dumps(make_prompts(tokenizer)))


def make_prompts(tokenizer) -> list[dict]:
  """Texts of exactly L tokens, the same in every run: sums as word problems, truncated."""
  rng, prompts = random.Random(0), []
  while len(prompts) < P * STEPS:
    text = ''
    while len(tokenizer(text)['input_ids']) <= L:
      name, thing = (
        rng.choice(('Ada', 'Ben', 'Cleo', 'Dan')),
        rng.choice(('apples', 'pens', 'cups')),
      )
      text += f'{name} has {rng.randint(2, 99)} {thing} and gives {rng.randint(2, 9)} away. '
    text = tokenizer.decode(tokenizer(text)['input_ids'][:L])
    ids = tokenizer(text)['input_ids']
    if len(ids) == L:
      prompts.append({'text': text, 'ids': ids})
  return prompts


# The workers.


def trl_worker(folder: pathlib.Path, microbatch: int) -> None:
  """Run TRL's own training loop, which waits for a command before every step."""
  pipe = CommandPipe()
  import datasets
  import torch
  import transformers
  import trl

  row: dict = {}

  class Trainer(trl.GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
      with timed(row, 'rollout'):
        out = super()._generate_and_score_completions(inputs)
      row['tokens'] = int(out['completion_mask'].sum())
      return out

  class OneStepPerCommand(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
      if pipe.wait() == 'stop':
        os._exit(0)  # within TRL's loop; nothing is left to save
      self.step = timed(row, 'step')
      self.step.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
      self.step.__exit__(None, None, None)
      row['update_wall_s'] = row['step_wall_s'] - row['rollout_wall_s']
      row['update_cpu_s'] = row['step_cpu_s'] - row['rollout_cpu_s']
      row['entropy'] = trainer._metrics['train']['entropy'][-1]
      pipe.reply(row)

  prompts = json.loads((folder / 'prompts.json').read_text())
  trainer = Trainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(folder / 'model', dtype=torch.float32),
    processing_class=transformers.AutoTokenizer.from_pretrained(folder / 'model'),
    train_dataset=datasets.Dataset.from_list([{'prompt': p['text']} for p in prompts]),
    reward_funcs=lambda completions, **_: [reward(text) for text in completions],
    args=trl_config(folder, microbatch),
    callbacks=[OneStepPerCommand()],
  )
  trainer.eos_token_ids = [
    -1
  ]  # the config below lets no row stop; this keeps rows from being truncated afterwards
  pipe.reply({'threads': torch.get_num_threads()})
  trainer.train()


def trl_config(folder: pathlib.Path, microbatch: int):
  import trl

  return trl.GRPOConfig(
    output_dir=str(folder / 'trl'),
    max_steps=10**6,
    per_device_train_batch_size=microbatch,
    gradient_accumulation_steps=P * G // microbatch,
    num_generations=G,
    max_completion_length=T,
    generation_kwargs={'eos_token_id': None},
    temperature=1.0,
    loss_type='grpo',
    beta=0.0,
    learning_rate=1e-6,
    lr_scheduler_type='constant',
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=True,
    shuffle_dataset=False,
    logging_strategy='no',
    save_strategy='no',
    report_to='none',
    disable_tqdm=True,
  )


def ours_worker(folder: pathlib.Path) -> None:
  """Run the compiled step; `split` times its two halves as separate programs."""
  pipe = CommandPipe()
  import jax
  import numpy as np

  from jaxrl_llm import models, step
  from jaxrl_llm.config import loading
  from jaxrl_llm.distributed import sharding
  from jaxrl_llm.learner import compile as programs
  from jaxrl_llm.learner import empty_records
  from jaxrl_llm.learner import state as train_state
  from jaxrl_llm.learner.spec_from_config import make_spec
  from jaxrl_llm.types import Batch, Prompts

  model = models.load(str(folder / 'model'))
  c = loading.default()
  c.dtype, c.optimizer.learning_rate = 'float32', 1e-6
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  spec = make_spec(c, model.config, (), sharding.make_mesh(c.mesh))
  state, batch = train_state.init_state(spec, model.params), empty_records.empty_batch(spec)
  fused = step.compile_step(spec)
  halves = None
  ids = np.array([p['ids'] for p in json.loads((folder / 'prompts.json').read_text())], np.int32)

  def grade(prompts, rollout):
    rollout = jax.tree.map(np.asarray, rollout)
    reward_B = np.array([reward(model.tokenizer.decode(x)) for x in rollout.tokens_BxT.tolist()])
    return Batch(prompts, rollout, reward_B.astype(np.float32), (reward_B > 0.5).astype(np.float32))

  pipe.reply({'threads': os.cpu_count()})
  index = 0
  while (command := pipe.wait()) != 'stop':
    index_P = np.arange(index * P, index * P + P, dtype=np.int32) % len(ids)
    born_P, expected_P = np.full_like(index_P, index), np.zeros(P, np.float32)
    prompts = Prompts(ids[index_P], np.full(P, L, np.int32), index_P, born_P, expected_P)
    row = {}
    if command == 'step':
      with timed(row, 'step'):
        state, rollout, metrics = fused(state, batch, prompts, None, None, T)
        batch = grade(prompts, rollout)
        metrics = {k: float(v) for k, v in metrics.items()}
    else:
      halves = halves or (programs.compile_update(spec), programs.compile_generate(spec))
      with timed(row, 'update'):
        state, metrics = jax.block_until_ready(halves[0](state, batch))
      with timed(row, 'rollout'):
        batch = grade(prompts, halves[1](state.params, prompts, 0, None))
    row['tokens'] = int(batch.rollout.length_B.sum())
    row['entropy'] = float(metrics['actor/entropy'])
    pipe.reply(row)
    index += 1


def main(name: str, folder: str, *options: str) -> None:
  worker = {'prepare': prepare, 'trl': trl_worker, 'ours': ours_worker}[name]
  worker(pathlib.Path(folder), *map(int, options))


if __name__ == '__main__':
  main(*sys.argv[1:])
