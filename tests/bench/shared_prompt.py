"""Gradients with a group's prompt encoded once, against the prompt repeated for every rollout: time and values.

python -m tests.bench.shared_prompt [--width 256 --layers 4 --turns 3 --smoke]
Groups of 8; prompts of 64, 256, 1024 tokens, completions of 64 and 256. Both alternate, and the best turn of each
counts. The ratio of tokens that pass through the layers is printed beside the ratio of times.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import data
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import microbatch, packing
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.types import Batch, ModelConfig, Prompts
from tests.bench.lib import smoke

G = 8


def step_spec(model: ModelConfig, prompt_tokens: int, completion_tokens: int, shared: bool):
  """One microbatch of a prompt and its 8 rows, which share a copy of it or have one each."""
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = (
    1,
    G,
    prompt_tokens,
    completion_tokens,
  )
  c.dtype, c.objective.head_chunk_tokens = 'float32', 512
  spec = make_spec(c, model, (), sharding.make_mesh(c.mesh, jax.devices()[:1]))
  read = completion_tokens - 1  # the last token predicts nothing
  size = packing.PackingSpec(1, prompt_tokens + G * read, G * completion_tokens, G, True)
  if not shared:
    size = packing.PackingSpec(G, prompt_tokens + read, completion_tokens, 1, False)
  return spec._replace(update=spec.update._replace(packing=size))


def gradient(spec):
  """The update's gradient of −Σ c·log π over the rows of one prompt."""

  def run(params, tokens_L, tokens_BxT, c_BxT):
    one_P, length_B = jnp.zeros(1, jnp.int32), jnp.full(G, tokens_BxT.shape[1], jnp.int32)
    prompts = Prompts(tokens_L[None], jnp.full(1, len(tokens_L), jnp.int32), one_P, one_P, one_P)
    rollout = data.as_rollout(tokens_BxT, length_B)
    packed = microbatch.pack(spec, Batch(prompts, rollout, length_B, length_B))

    def add(total, one, c_RxT):

      def loss(params):
        logp_ZxU, _ = microbatch.packed_log_probs(spec, params, one)
        return -(one.to_tokens(c_RxT) * logp_ZxU).sum()

      return jax.tree.map(jnp.add, total, jax.grad(loss)(params))

    zeros = jax.tree.map(jnp.zeros_like, params)
    return microbatch.accumulate(spec, packed, c_BxT, add, zeros)

  return jax.jit(run)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--width', type=int, default=256)
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--turns', type=int, default=3)
  sizes = lambda text: [int(x) for x in text.split(',')]  # noqa: E731
  parser.add_argument('--prompt-tokens', type=sizes, default=[64, 256, 1024])
  parser.add_argument('--completion-tokens', type=sizes, default=[64, 256])
  tiny = dict(width=64, layers=1, turns=1, prompt_tokens=[16], completion_tokens=[8])
  options = smoke.parse(parser, **tiny)
  model = ModelConfig(
    vocab=1024, width=options.width, layers=options.layers, heads=options.width // 64,
    kv_heads=options.width // 64, head_dim=64, mlp=3 * options.width, max_tokens=2048,
  )  # fmt: skip
  params, random = decoder.init(model, 0), np.random.default_rng(0)
  print('prompt  completion  once, s  repeated, s   time   tokens   largest gap of the gradient')
  for L in options.prompt_tokens:
    for T in options.completion_tokens:
      ids = random.integers(0, model.vocab, L), random.integers(0, model.vocab, (G, T))
      inputs = params, *ids, random.normal(size=(G, T)).astype(np.float32) / (G * T)
      fns = [gradient(step_spec(model, L, T, shared)) for shared in (True, False)]
      best = [np.inf, np.inf]
      grads = [jax.block_until_ready(fn(*inputs)) for fn in fns]
      for _ in range(options.turns):
        for which, fn in enumerate(fns):
          began = time.perf_counter()
          jax.block_until_ready(fn(*inputs))
          best[which] = min(best[which], time.perf_counter() - began)
      gap = jax.tree.reduce(max, jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), *grads))
      tokens = (L + G * T) / (G * (L + T))
      print(
        f'{L:6} {T:11} {best[0]:8.3f} {best[1]:12.3f} {best[0] / best[1]:6.2f} {tokens:8.2f} {gap:12.1e}',
        flush=True,
      )


if __name__ == '__main__':
  main()
