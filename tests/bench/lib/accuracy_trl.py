"""The side of TRL in time_to_accuracy.py, and the folder that both sides read.

accuracy_trl.py prepare FOLDER CONFIG 0|1 [override]... | train FOLDER WORKDIR SEED ITERATIONS MICROBATCH
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.bench.lib import trl_jobs


def prepare(folder: pathlib.Path, config_name: str, tiny: str, *overrides: str) -> None:
  """Writes FOLDER/model, and job.json: what TRL's process needs of the config, without jax."""
  from jaxrl_llm import data
  from jaxrl_llm.config import loading, schema

  model = trl_jobs.export_model(folder, tiny == '1')
  config = schema.typed(loading.load(config_name, overrides))
  tables = data.load(config, model.tokenizer)
  job = dict(
    config=json.loads(config.to_json()),
    end_ids=list(model.tokenizer.end_ids),
    train=[],
    held_out=[],
  )
  for name, table in (('train', tables.train), ('held_out', tables.held_out)):
    prompts = [data.render(row, config.data) for row in table.rows]
    trl_jobs.check_token_ids(folder, prompts, table.tokens)
    job[name] = [
      dict(prompt=prompt, row=row._asdict())
      for prompt, row in zip(prompts, table.rows, strict=True)
    ]
  part = folder / 'job.json.part'
  part.write_text(json.dumps(job))
  os.replace(part, folder / 'job.json')


def train(
  folder: pathlib.Path, workdir: str, seed: str, iterations: str, microbatch: str
) -> None:  # fmt: skip
  """TRL's GRPOTrainer on the job, which prints the events that `accuracy_points.Clock` reads."""
  events = Events()
  import datasets

  from jaxrl_llm import rewards

  job = json.loads((folder / 'job.json').read_text())
  model, tokenizer = trl_jobs.load_trl_model(folder)
  with rewards.Pool(job['config']['rewards']) as pool:
    grader = Grader(job, pool, events)
    evaluator = Evaluator(job, grader, events, tokenizer)
    trainer_type, callback = trainer_types(evaluator, job['config'], int(iterations))
    rows = [dict(prompt=x['prompt'], number=i) for i, x in enumerate(job['train'])]
    trainer = trainer_type(
      model=model,
      processing_class=tokenizer,
      train_dataset=datasets.Dataset.from_list(rows),
      reward_funcs=grader.reward,
      args=settings(pathlib.Path(workdir), job, int(seed), int(iterations), int(microbatch)),
      callbacks=[callback],
    )
    trainer.eos_token_ids = job['end_ids']
    trainer.train()


def settings(workdir: pathlib.Path, job: dict, seed: int, iterations: int, microbatch: int):
  """TRL's settings of the job: DAPO's loss, and `iterations` optimizer steps on each batch."""
  config = job['config']
  clip = config['objective']['trust_region']
  rows = config['prompts'] * config['rollouts']
  return trl_jobs.grpo_config(
    workdir,
    rows,
    min(microbatch, rows),
    seed=seed,
    max_steps=config['steps'] * iterations,
    num_generations=config['rollouts'],
    num_iterations=iterations,
    max_completion_length=config['completion_tokens'],
    generation_kwargs={'eos_token_id': job['end_ids']},
    learning_rate=config['optimizer']['learning_rate'],
    lr_scheduler_type=config['optimizer']['decay'],
    weight_decay=config['optimizer']['weight_decay'],
    loss_type='dapo',
    epsilon=clip['low'],
    epsilon_high=clip['high'],
  )


class Events:
  """Standard output, as events of config.monitoring.console=json; output of libraries goes to standard error."""

  def __init__(self):
    self._out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)

  def write(self, event: str, **fields: Any) -> None:
    print(json.dumps(dict(event=event) | fields), file=self._out, flush=True)


class Grader:
  """Rewards of completions by the job's own reward functions and length penalty."""

  def __init__(self, job: dict, pool, events: Events):
    from jaxrl_llm.types import Row

    self._pool, self._events, self._config = pool, events, job['config']
    self._train = [Row(**x['row']) for x in job['train']]
    self._held_out = [Row(**x['row']) for x in job['held_out']]

  def reward(self, completions, completion_ids, number, **_) -> list[float]:
    """Rewards of a generation batch, whose groups follow one another."""
    texts = [trl_jobs.text_of(completion) for completion in completions]
    score_B = self._pool.score([self._train[i] for i in number], texts).reward_B
    length_B = np.array([len(ids) for ids in completion_ids])
    self._events.write('step', **{'perf/rollouts': len(texts)})
    return shaped(score_B, length_B, self._config).tolist()

  def accuracy(self, texts: Sequence[str]) -> float:
    """The share of correct completions of the held-out prompts."""
    score_N = self._pool.score(self._held_out, list(texts)).reward_B
    return float((score_N >= self._config['rewards']['right']).mean())


def shaped(score_B: np.ndarray, length_B: np.ndarray, config: dict) -> np.ndarray:
  """Scores with the penalty for overlong completions, in groups whose scores differ alone.

  The config masks other groups before it shapes rewards; TRL would learn from their lengths.
  """
  shaping = config['objective']['reward_shaping']
  if shaping['fn'] == 'none':
    return score_B
  if shaping['fn'] != 'overlong' or config['objective']['zero_variance']['fn'] != 'mask':
    raise SystemExit(
      f'config.objective.reward_shaping.fn={shaping["fn"]!r} has no counterpart on the side of TRL; choose overlong '
      "with config.objective.zero_variance.fn='mask', or none."
    )
  start = config['completion_tokens'] - shaping['buffer_tokens']
  over_B = np.maximum(length_B - start, 0) / shaping['buffer_tokens']
  score_PxG = score_B.reshape(-1, config['rollouts'])
  is_mixed_B = np.repeat(np.ptp(score_PxG, axis=1) > 0, config['rollouts'])
  return score_B - np.where(is_mixed_B, shaping.get('factor', 1.0) * over_B, 0.0)


class Evaluator:
  """Greedy completions of the held-out prompts, graded."""

  BATCH = 100  # prompts at a time

  def __init__(self, job: dict, grader: Grader, events: Events, tokenizer):
    self._grader, self._events, self._tokenizer = grader, events, tokenizer
    self._tokens, self._end_ids = job['config']['completion_tokens'], job['end_ids']
    self._ids = [self._encode(x['prompt']) for x in job['held_out']]

  def run(self, model, step: int) -> None:
    """Evaluates the weights after `step` generation batches, and writes the events."""
    import torch

    self._events.write('evaluating', step=step)
    texts, was_training = [], model.training
    model.eval()
    with torch.no_grad():
      for start in range(0, len(self._ids), self.BATCH):
        texts += self._complete(model, self._ids[start : start + self.BATCH])
    model.train(was_training)
    accuracy = self._grader.accuracy(texts)
    self._events.write('evaluation', step=step, **{'val-core/all/acc/greedy': accuracy})

  def _encode(self, prompt) -> list[int]:
    if isinstance(prompt, str):
      return list(self._tokenizer(prompt)['input_ids'])
    chat = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    return list(chat['input_ids'])

  def _complete(self, model, ids: Sequence[list[int]]) -> list[str]:
    import torch

    pad = self._tokenizer.pad_token_id
    longest = max(map(len, ids))
    tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    out = model.generate(
      input_ids=tokens,
      attention_mask=mask,
      do_sample=False,
      max_new_tokens=self._tokens,
      eos_token_id=self._end_ids,
      pad_token_id=pad,
    )
    return [self._decode(row) for row in out[:, longest:].tolist()]

  def _decode(self, tokens: list[int]) -> str:
    """The text up to the end token: padding may be an ordinary token."""
    ends = [i for i, token in enumerate(tokens) if token in self._end_ids]
    return self._tokenizer.decode(tokens[: ends[0]] if ends else tokens, skip_special_tokens=True)


def trainer_types(evaluator: Evaluator, config: dict, iterations: int):
  """(GRPOTrainer, a callback that evaluates as config.evaluation.every says, and at both ends)."""
  import transformers
  import trl

  every, steps = config['evaluation']['every'], config['steps']

  class Evaluation(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
      evaluator.run(model, 0)

    def on_step_end(self, args, state, control, model=None, **kwargs):
      done, rest = divmod(state.global_step, iterations)
      if not rest and (done == steps or (every and done % every == 0)):
        evaluator.run(model, done)

  return trl.GRPOTrainer, Evaluation()


def main(name: str, folder: str, *options: str) -> None:
  command = {'prepare': prepare, 'train': train}[name]
  command(pathlib.Path(folder), *options)


if __name__ == '__main__':
  main(*sys.argv[1:])
