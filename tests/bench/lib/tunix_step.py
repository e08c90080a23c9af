"""The workers of Tunix in step_time.py: google-tunix's GRPO learner with its own JAX sampler, a step per command.

Run by the interpreter of an environment that has google-tunix; nothing here imports this program.

tunix_step.py check FOLDER SHAPE | train FOLDER SHAPE MICROBATCH

The model is Tunix's Qwen2: with biases of 0 it computes the same as a Llama. Tunix's Llama3 has the base of its rotary
positions fixed at 1,000,000, whatever its config says.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import sys

import numpy as np

from tests.bench.lib import results, step_shapes
from tests.bench.lib.step_shapes import FULL, Job
from tests.bench.lib.step_workers import CommandPipe, timed

PACKAGES = ('google-tunix', 'jax', 'jaxlib', 'flax', 'transformers')
# Matrices with a bias in Tunix's Qwen2.
BIASED = ('q_proj.weight', 'k_proj.weight', 'v_proj.weight')
# Ids that no token has, so that no sampled token is taken for padding or an end.
PAD, NO_END = -1, -2


def check(folder: pathlib.Path, name: str) -> None:
  """Writes FOLDER/tunix_model; replies with the largest difference between Tunix's logits and SHAPE_logits.npz."""
  pipe = CommandPipe()
  write_weights(folder)
  model, _ = load_model(folder)
  stored = np.load(folder / f'{name}_logits.npz')
  tokens_PxL, mask_PxL = stored['tokens_PxL'], stored['mask_PxL']
  L = tokens_PxL.shape[1]
  mask_PxLxL = np.tril(np.ones((L, L), bool)) & mask_PxL[:, None]
  position_PxL = np.broadcast_to(np.arange(L), tokens_PxL.shape)
  logits_PxLxV, _ = model(tokens_PxL, position_PxL, None, mask_PxLxL)
  difference_PxLxV = np.abs(np.asarray(logits_PxLxV) - stored['logits_PxLxV'])
  gap = float(difference_PxLxV[mask_PxL].max())
  pipe.reply({'gap': gap, 'versions': results.versions(PACKAGES)})


def write_weights(folder: pathlib.Path) -> None:
  """FOLDER/tunix_model: the tensors of FOLDER/model, and biases of 0 where Tunix's Qwen2 has them."""
  from safetensors import numpy as safetensors

  tensors = {}
  for path in sorted((folder / 'model').glob('*.safetensors')):
    tensors |= safetensors.load_file(path)
  for name in [x for x in tensors if x.endswith(BIASED)]:
    bias = np.zeros(tensors[name].shape[0], np.float32)
    tensors.setdefault(f'{name.removesuffix("weight")}bias', bias)
  (folder / 'tunix_model').mkdir(exist_ok=True)
  safetensors.save_file(tensors, folder / 'tunix_model' / 'model.safetensors')


def load_model(folder: pathlib.Path):
  """(Tunix's model in float32, its mesh of one device), from FOLDER/tunix_model by Tunix's loader."""
  import jax
  import jax.numpy as jnp
  from tunix.models.qwen2 import model as qwen2
  from tunix.models.qwen2 import params

  sizes = json.loads((folder / 'model' / 'config.json').read_text())
  config = qwen2.ModelConfig(
    num_layers=sizes['num_hidden_layers'],
    vocab_size=sizes['vocab_size'],
    embed_dim=sizes['hidden_size'],
    hidden_dim=sizes['intermediate_size'],
    num_heads=sizes['num_attention_heads'],
    head_dim=sizes['head_dim'],
    num_kv_heads=sizes['num_key_value_heads'],
    rope_theta=sizes['rope_theta'],
    norm_eps=sizes['rms_norm_eps'],
    use_tied_embedding=sizes['tie_word_embeddings'],
  )
  mesh = jax.make_mesh((1, 1), ('fsdp', 'tp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  path = str(folder / 'tunix_model')
  return params.create_model_from_safe_tensors(path, config, mesh, dtype=jnp.float32), mesh


class Tokenizer:
  """The model's tokenizer with the methods that Tunix calls; it puts no token before a prompt."""

  def __init__(self, folder: pathlib.Path, job: Job):
    import transformers

    self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder / 'model')
    self._end_id = job.end_ids[0]

  def texts(self, job: Job) -> list[str]:
    """The prompts as texts. Raises SystemExit unless they are encoded to the token ids of the job."""
    chat = functools.partial(
      self._tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False
    )
    texts = [x if isinstance(x, str) else chat(x) for x in job.prompts]
    for text, ids in zip(texts, job.ids, strict=True):
      if self.encode(text) != ids:
        raise SystemExit(
          f"Tunix's environment encodes the prompt {text!r} as {self.encode(text)}, and jaxrl_llm as {ids}; install "
          'another version of transformers there.'
        )
    return texts

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(str(text), add_special_tokens=False)

  def decode(self, ids: list[int]) -> str:
    return self._tokenizer.decode(ids, skip_special_tokens=True)

  def bos_id(self) -> None:
    return None

  def eos_id(self) -> int:
    return self._end_id

  def pad_id(self) -> int:
    return PAD


def train(folder: pathlib.Path, name: str, microbatch: str) -> None:
  """Runs Tunix's own training loop, which waits for a command before every step."""
  pipe = CommandPipe()
  job = step_shapes.read_job(folder / f'{name}.json')
  row: dict = {}
  model, mesh = load_model(folder)
  tokenizer = Tokenizer(folder, job)
  texts = tokenizer.texts(job)
  learner = make_learner(job, model, mesh, tokenizer, int(microbatch), row)
  pipe.reply({'threads': os.cpu_count()})
  learner.train(commanded_batches(pipe, job, texts, row))


def commanded_batches(pipe: CommandPipe, job: Job, texts: list[str], row: dict):
  """Yields a batch of prompts for each command `step`; the request for the next batch ends the step."""
  for number in itertools.count():
    if pipe.wait() == 'stop':
      return
    index_P = job.step_prompts(number)
    with timed(row, 'step'):
      yield dict(prompts=np.array([texts[i] for i in index_P]), number=index_P)
    for clock in ('wall_s', 'cpu_s'):
      row[f'update_{clock}'] = row[f'step_{clock}'] - row[f'rollout_{clock}']
    pipe.reply(row)


def make_learner(job: Job, model, mesh, tokenizer: Tokenizer, microbatch: int, row: dict):
  """Tunix's GRPOLearner with a clock around its rollouts."""
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner

  G = job.shape.rollouts

  class Learner(grpo_learner.GRPOLearner):
    def _generate_and_compute_advantage(self, training_input, *args):
      with timed(row, 'rollout'):
        out = super()._generate_and_compute_advantage(training_input, *args)
      row['tokens'] = int(out.completion_mask.sum())
      row['mixed'] = int((np.asarray(out.advantages).reshape(-1, G) != 0).any(1).sum())
      return out

  def reward(prompts, completions, number, **_):
    pairs = enumerate(zip(number, completions, strict=True))
    return [job.reward(int(prompt), i % G, text) for i, (prompt, text) in pairs]

  cluster = rl_cluster.RLCluster(
    actor=model,
    tokenizer=tokenizer,
    cluster_config=cluster_config(job, mesh, microbatch),
  )
  assert job.shape.tunix is not None
  settings = grpo_learner.GRPOConfig(
    num_generations=G, num_iterations=1, beta=0.0, epsilon=0.2, **job.shape.tunix
  )
  return Learner(cluster, settings, reward)


def cluster_config(job: Job, mesh, microbatch: int):
  """Actor and sampler on one device, with the optimizer of trl_jobs.grpo_config; `microbatch` counts rollouts."""
  import optax
  from tunix.rl import rl_cluster
  from tunix.rl.rollout import base_rollout

  shape = job.shape
  adamw = optax.adamw(1e-6, b1=0.9, b2=0.95, weight_decay=0.0)
  # With one microbatch, leaving its size out saves a copy of the gradient.
  is_whole = microbatch == shape.prompts * shape.rollouts
  training = rl_cluster.RLTrainingConfig(
    actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), adamw),
    eval_every_n_steps=10**6,
    max_steps=10**6,
    mini_batch_size=shape.prompts,
    train_micro_batch_size=None if is_whole else microbatch // shape.rollouts,
    rollout_micro_batch_size=shape.prompts,
    compute_logps_micro_batch_size=shape.prompts,
  )
  rollout = base_rollout.RolloutConfig(
    max_tokens_to_generate=shape.completion_tokens,
    max_prompt_length=shape.prompt_tokens,
    kv_cache_size=shape.prompt_tokens + shape.completion_tokens,
    temperature=1.0,
    top_p=1.0,
    eos_tokens=[NO_END] if shape.lengths == FULL else list(job.end_ids),
  )
  return rl_cluster.ClusterConfig(
    role_to_mesh={rl_cluster.Role.ACTOR: mesh, rl_cluster.Role.ROLLOUT: mesh},
    rollout_engine='vanilla',
    training_config=training,
    rollout_config=rollout,
  )


def main(name: str, folder: str, *options: str) -> None:
  {'check': check, 'train': train}[name](pathlib.Path(folder), *options)


if __name__ == '__main__':
  main(*sys.argv[1:])
