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

from jaxrl_llm.models import decoder, logprob, shared_prompt_forward
from jaxrl_llm.types import ModelConfig, Prompts
from tests.bench.lib import smoke

G = 8


def gradient(model: ModelConfig, rows_per_prompt: int):
  """The gradient of −Σ c·log π over 8 rows of one prompt, which is encoded once per `rows_per_prompt` rows."""

  def loss(params, tokens_L, tokens_BxT, c_BxT):
    P, L = G // rows_per_prompt, len(tokens_L)
    zeros = jnp.zeros(P, jnp.int32)
    prompts = Prompts(
      jnp.broadcast_to(tokens_L, (P, L)), jnp.full(P, L, jnp.int32), zeros, zeros, zeros
    )
    hidden = shared_prompt_forward.hidden(model, params, prompts, tokens_BxT)
    logp, _ = logprob.token_logp(
      model, params, hidden, tokens_BxT, temperature=1.0, chunk_tokens=512
    )
    return -(c_BxT * logp).sum()

  return jax.jit(jax.grad(loss))


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
      fns, best = (gradient(model, G), gradient(model, 1)), [np.inf, np.inf]
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
