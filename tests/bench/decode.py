"""Tokens per second of decoding, against generate() of transformers: SmolLM2 float32, 32 rows, 64 + 128 tokens.

python -m tests.bench.decode [--turns 3] [--smoke]      needs torch and transformers (the extra `parity`)
Both use the same prompts and weights, sample at temperature 1, and never stop early. They alternate in one process, and
the best turn of each counts. Also printed: the memory bandwidth of this machine, and the time to read all weights once
per token at that bandwidth.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault(
  'OMP_WAIT_POLICY', 'passive'
)  # otherwise idle torch threads occupy cores that jax could use
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np
import torch
import transformers

from jaxrl_llm import models
from jaxrl_llm.config import loading as configs
from jaxrl_llm.models import decoder, default_model, shared_prompt_forward
from jaxrl_llm.rollout import ring_decode
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import Prompts
from tests.bench.lib import smoke

B, L, T = 32, 64, 128


def ours(model, tokens_BxL, rollouts: int, slots: int):
  """Returns a function of no arguments that generates [B, T] tokens."""
  P = B // rollouts
  spec = ring_decode.DecodeSettings(rollouts, T, 1.0, (), 'float32', slots=slots)
  index_P = np.arange(P, dtype=np.int32)
  length_P, zeros = np.full(P, L, np.int32), np.zeros(P, np.float32)
  prompts = Prompts(tokens_BxL[:P], length_P, index_P, index_P, zeros)
  key = jax.random.key(0)
  fn = jax.jit(lambda p, q: ring_decode.generate(model.config, spec, DecodeInputs(p, q, key, 0))[0])
  return lambda: np.asarray(jax.block_until_ready(fn(model.params, prompts)).tokens_BxT)


def theirs(model, tokens_BxL):
  """`transformers` with the same weights."""
  config = model.config
  reference = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=config.vocab,
      hidden_size=config.width,
      intermediate_size=config.mlp,
      num_hidden_layers=config.layers,
      num_attention_heads=config.heads,
      num_key_value_heads=config.kv_heads,
      head_dim=config.head_dim,
      rope_theta=config.rope_theta,
      rms_norm_eps=config.norm_eps,
      tie_word_embeddings=config.tied,
      max_position_embeddings=config.max_tokens,
    )
  ).eval()
  # Rates do not depend on the values of weights. Random ones avoid special values such as denormals.
  ids = torch.from_numpy(tokens_BxL.astype(np.int64))
  settings = dict(max_new_tokens=T, min_new_tokens=T, do_sample=True, temperature=1.0, top_k=0)

  def run():
    with torch.inference_mode():
      mask = torch.ones_like(ids)
      out = reference.generate(ids, attention_mask=mask, pad_token_id=0, **settings)
    return out[:, L:].numpy()

  return run


def prefill(model, tokens_BxL) -> float:
  """Seconds to encode 32 prompts in one pass, before the loop: the best of three."""
  index_B, zeros = np.arange(B, dtype=np.int32), np.zeros(B, np.float32)
  prompts = Prompts(tokens_BxL, np.full(B, L, np.int32), index_B, index_B, zeros)

  @jax.jit
  def fn(params):
    cache, last_BxD = shared_prompt_forward.prefill(model.config, params, prompts, 'float32')
    return cache, decoder.head(model.config, params, last_BxD)

  times = []
  for _ in range(4):
    began = time.perf_counter()
    jax.block_until_ready(fn(model.params))
    times.append(time.perf_counter() - began)
  return min(times[1:])


def bandwidth(numbers: int) -> float:
  """Bytes per second of summing an array of float32, the best of five."""
  x = jax.numpy.ones(numbers, jax.numpy.float32)
  total = jax.jit(lambda x: x.sum())
  total(x).block_until_ready()
  times = []
  for _ in range(5):
    began = time.perf_counter()
    total(x).block_until_ready()
    times.append(time.perf_counter() - began)
  return x.nbytes / min(times)


def main(turns: int, tiny: bool) -> None:
  if tiny:
    model = models.load(
      'scratch', scratch=configs.default().scratch.to_dict() | dict(max_tokens=L + T)
    )
  else:
    model = models.load(default_model.NAME)
  tokens_BxL = (
    np.random.default_rng(0)
    .integers(model.config.vocab // 2, model.config.vocab, (B, L))
    .astype(np.int32)
  )
  runs = {
    'transformers generate': theirs(model, tokens_BxL),
    '32 prompts': ours(model, tokens_BxL, 1, 0),
    '4 prompts x 8 rollouts': ours(model, tokens_BxL, 8, 0),
    '4 x 8 in 16 slots': ours(model, tokens_BxL, 8, 16),
  }
  best = {}
  for turn in range(turns + 1):  # the first one compiles
    for name, run in runs.items():
      began, cpu = time.perf_counter(), time.process_time()
      assert run().shape == (B, T)
      took = time.perf_counter() - began, time.process_time() - cpu
      if turn:
        best[name] = min(best.get(name, took), took)
  encoding, rate = prefill(model, tokens_BxL), bandwidth(2**20 if tiny else 2**28)
  weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
  print(f'{"":24} tokens/s   seconds   CPU-s   of transformers')
  for name, (wall, cpu) in best.items():
    ratio = best['transformers generate'][0] / wall
    print(f'{name:24} {B * T / wall:8.0f} {wall:9.2f} {cpu:7.1f} {ratio:8.2f}x')
  per_token = best['32 prompts'][0] / (B * T)
  print(
    f'{B} prompts encoded in one pass: {encoding:.2f} s; streamed through the loop, a token of each an '
    f'iteration: {B * L * per_token:.2f} s'
  )
  print(
    f'memory: {rate / 1e9:.1f} GB/s; all weights once per token, {T} times: {T * weights / rate:.2f} s'
  )
  print(
    f'jax {jax.__version__}, torch {torch.__version__} ({torch.get_num_threads()} threads), '
    f'transformers {transformers.__version__}, {os.cpu_count()} cores'
  )


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--turns', type=int, default=3)
  options = smoke.parse(parser, turns=1)
  sys.exit(main(options.turns, options.smoke))
