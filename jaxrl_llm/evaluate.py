"""Accuracy on held-out prompts: one greedy answer each, and the mean and best of k samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm import shard
from jaxrl_llm import step as steps
from jaxrl_llm.generate import exits, stopping
from jaxrl_llm.generate.sampling import Filter
from jaxrl_llm.program import Program
from jaxrl_llm.types import Prompts

# Evaluation draws its noise under a step number that training never reaches, the same every time:
# before and after are paired.
_NOISE = 2**30
_BATCH_ROLLOUTS = 128


def make_evaluator(
  program: Program, table: Any, decode: Callable, pool: Any, samples: int, sampling: Any
) -> Callable:
  """Returns evaluate(params) → (metrics, rows), compiled once for greedy and once for sampling.

  `table` holds the held-out prompts, `decode` turns token ids into text, `pool` grades;
  `sampling` holds temperature, top_k, top_p, min_p of the samples. Metrics are
  val-core/<source>/acc/{greedy, mean@k, best@k}; rows hold every answer. Source: none.
  """
  shards = shard.rows_shards(program.mesh)
  size = max(_BATCH_ROLLOUTS // max(samples, 1), shards)
  size = min(size, len(table.rows) + shards - 1) // shards * shards
  # What is saved is evaluated, and that is not rounded.
  program = program._replace(prune=None, weights_dtype=program.generate.dtype)
  whole = program.generate._replace(slots=0, stop=stopping.none, exit=exits.none)
  kinds = {'greedy': whole._replace(rollouts=1, temperature=0.0)}
  if samples:
    kinds['sampled'] = whole._replace(
      rollouts=samples,
      temperature=sampling['temperature'],
      keep=Filter(*(sampling[k] for k in Filter._fields)),
    )
  plain = program._replace(tree=None)
  run = {k: steps.compile_generate(plain._replace(generate=v)) for k, v in kinds.items()}

  def evaluate(params: Any) -> tuple[dict[str, float], list[dict]]:
    rewards, rows = {}, []
    for kind, fn in run.items():
      texts = _texts(fn, params, table, size, program.seed, decode)
      flat = [row for row, answers in zip(table.rows, texts, strict=True) for _ in answers]
      scores = pool.score(flat, [text for answers in texts for text in answers])
      rewards[kind] = scores.reward_B.reshape(len(table.rows), -1)
      rows += [
        dict(kind=kind, question=row.question, gts=row.answer, output=answers, score=got.tolist())
        for row, answers, got in zip(table.rows, texts, rewards[kind], strict=True)
      ]
    return _summary(rewards, [row.source for row in table.rows]), rows

  return evaluate


def _texts(
  fn: Callable, params: Any, table: Any, size: int, seed: int, decode: Callable
) -> list[list[str]]:
  """All answers to every prompt, in order; the last batch is filled up with the first prompt."""
  count, texts = len(table.rows), []
  for start in range(0, count, size):
    index = np.arange(start, start + size)
    prompts: Prompts = table.prompts(np.where(index < count, index, 0), born=_NOISE)
    rollout = fn(params, prompts._replace(index_P=index.astype(np.int32)), np.int32(seed))
    tokens_BxT, length_B = shard.fetch((rollout.tokens_BxT, rollout.length_B))
    decoded = [decode(t[:n].tolist()) for t, n in zip(tokens_BxT, length_B, strict=True)]
    each = len(decoded) // size
    texts += [decoded[i * each : (i + 1) * each] for i in range(size)]
  return texts[:count]


def _summary(rewards: dict[str, np.ndarray], sources: list[str]) -> dict[str, float]:
  metrics = {}
  for source in [*sorted(set(sources)), 'all']:
    chosen = [source in (s, 'all') for s in sources]
    name = f'val-core/{source}/acc'
    metrics[f'{name}/greedy'] = float(rewards['greedy'][chosen].mean())
    if 'sampled' in rewards:
      k = rewards['sampled'].shape[1]
      metrics[f'{name}/mean@{k}'] = float(rewards['sampled'][chosen].mean())
      metrics[f'{name}/best@{k}'] = float(rewards['sampled'][chosen].max(1).mean())
  return metrics
