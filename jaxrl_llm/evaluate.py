"""Accuracy on held-out prompts: one greedy answer each, and the mean and best of k samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import rounds, shard
from jaxrl_llm import step as steps
from jaxrl_llm.generate import exits, stopping
from jaxrl_llm.generate.sampling import Filter
from jaxrl_llm.program import Program
from jaxrl_llm.types import Prompts, Rollout, Turns

# Evaluation draws its noise under a step number that training never reaches, the same every time:
# before and after are paired.
_NOISE = 2**30
_BATCH_ROLLOUTS = 128


def make_evaluator(
  program: Program,
  table: Any,
  decode: Callable,
  pool: Any,
  samples: int,
  sampling: Any,
  play: rounds.Play | None = None,
) -> Callable:
  """Returns evaluate(params) → (metrics, rows), compiled once for greedy and once for sampling.

  `table` holds the held-out prompts, `decode` turns token ids into text, `pool` grades;
  `sampling` holds temperature, top_k, top_p, min_p of the samples. Metrics are
  val-core/<source>/acc/{greedy, mean@k, best@k}; rows hold every answer. With `play` prompts are episodes of its
  environment, all turns it allows. Source: none.
  """
  shards = shard.rows_shards(program.mesh)
  size = max(_BATCH_ROLLOUTS // max(samples, 1), shards)
  size = min(size, len(table.rows) + shards - 1) // shards * shards
  # What is saved is evaluated, and that is not rounded.
  program = program._replace(prune=None, weights_dtype=program.generate.dtype)
  # An exit rule of an environment's rows ends their turns.
  leave = program.generate.exit if play else exits.none
  whole = program.generate._replace(slots=0, stop=stopping.none, exit=leave)
  kinds = {'greedy': whole._replace(rollouts=1, temperature=0.0)}
  if samples:
    kinds['sampled'] = whole._replace(
      rollouts=samples,
      temperature=sampling['temperature'],
      keep=Filter(*(sampling[k] for k in Filter._fields)),
    )
  plain = program._replace(tree=None)
  run = {k: (steps.compile_generate(plain._replace(generate=v)), v) for k, v in kinds.items()}

  def evaluate(params: Any) -> tuple[dict[str, float], list[dict]]:
    rewards, rows = {}, []
    for kind, (fn, spec) in run.items():
      said = _said(fn, params, table, size, program._replace(generate=spec), decode, play)
      flat = [row for row, answers in zip(table.rows, said.texts, strict=True) for _ in answers]
      ask = lambda: pool.score(flat, [text for answers in said.texts for text in answers])  # noqa: B023, E731
      scores = ask() if play is None else play.scores(said.turns, ask, 1)
      rewards[kind] = scores.reward_B.reshape(len(table.rows), -1)
      rows += [
        dict(kind=kind, question=row.question, gts=row.answer, output=answers, score=got.tolist())
        for row, answers, got in zip(table.rows, said.shown, rewards[kind], strict=True)
      ]
    return _summary(rewards, [row.source for row in table.rows]), rows

  return evaluate


class _Said(NamedTuple):
  """All answers to every prompt, in order."""

  texts: list[list[str]]  # what is graded
  shown: list[list[str]]  # all of it, an environment's answers too
  turns: Turns | None  # of rows


def _said(
  fn: Callable, params: Any, table: Any, size: int, program: Program, decode: Callable, play: Any
) -> _Said:
  """The last batch is filled up with the first prompt."""
  count, texts, shown, turns = len(table.rows), [], [], []
  for start in range(0, count, size):
    index = np.arange(start, start + size)
    chosen = np.where(index < count, index, 0)
    prompts: Prompts = table.prompts(chosen, born=_NOISE)._replace(index_P=index.astype(np.int32))
    rollout = _rollout(fn, params, prompts, [table.rows[i] for i in chosen], program, play)
    said = zip(rollout.tokens_BxT, rollout.length_B, strict=True)
    decoded = last = [decode(t[:n].tolist()) for t, n in said]
    if play is not None:
      numbers = rollout.turns.number_BxT
      last = [play.texts(*one)[-1] for one in zip(rollout.tokens_BxT, numbers, strict=True)]
    each = len(decoded) // size
    by_prompt = lambda x: [x[i * each : (i + 1) * each] for i in range(size)]  # noqa: B023, E731
    texts, shown = texts + by_prompt(last), shown + by_prompt(decoded)
    turns.append(rollout.turns)
  joined = play and Turns(*(np.concatenate(x)[: count * each] for x in zip(*turns, strict=True)))
  return _Said(texts[:count], shown[:count], joined)


def _rollout(fn: Callable, params: Any, prompts: Prompts, rows, program: Program, play) -> Rollout:
  """A batch's rollouts: one call, or the rounds of an environment's episodes."""
  seed = np.int32(program.seed)
  if play is None:
    return shard.fetch(fn(params, prompts, seed, None))
  prompts = play.opened(prompts, rows, prompts.tokens_PxL.shape[1])
  sample = lambda begun: (shard.fetch(fn(params, prompts, seed, begun)), {})  # noqa: E731
  begun = steps.empty_rollout(program._replace(prompts=len(rows)))
  limits = rounds.Limits(program.generate.max_tokens, play.most)
  return play.finish(sample, prompts, rows, begun, limits)[0]


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
