"""Accuracy on held-out prompts: a greedy completion and n samples each: mean and best, pass@k, majority votes.

A file of eval/ is a JSON object:

  version, model, grader, settings   see `held_out.identity`
  weights   `fingerprint` of the evaluated parameters
  step      of the run, 0 for the model as loaded
  metrics   val-core/<source>/acc/<measure> → a number, with <source> 'all' for all prompts
  groups    the same with intervals, by source and by level, and curves over k: see `evaluation.tally.groups`
  rows      every prompt with its completions

A row is one prompt with its greedy completion or its samples:

  kind      'greedy' or 'sampled'
  id        of the prompt, a hash of source, question and answer
  source    that of the data
  level     the difficulty that the row states, such as 'length=3'; '' where it states none
  question  as text or messages
  gts       the label
  output    its completions
  score     of each, from the reward function
  answer    of each, the answer that the reward function compares, '…' or None; only where its parser is known.
            Of math_verify, a number or LaTeX as it is spelled: x + 1 and 1 + x are two answers to a vote
  trust     of each, P(correct) by the correctness head of config.rollout.pruning; only of samples, where there is one
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import data, evaluation
from jaxrl_llm.config.schema import SamplingConfig
from jaxrl_llm.distributed import sharding
from jaxrl_llm.evaluation.levels import levels
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import device_memory, empty_records
from jaxrl_llm.learner.step_spec import StepSpec, evaluation_spec, trained_weights_spec
from jaxrl_llm.rollout import prompt_prefix
from jaxrl_llm.rollout.sampling import TokenFilter
from jaxrl_llm.runner import multi_turn
from jaxrl_llm.runner.context import ScorePool
from jaxrl_llm.types import JsonObject, Params, Prompts, Rollout, Row, Settings, Turns

# Evaluation draws its noise under a step number that training never reaches, the same every time:
# evaluations before and after training are paired.
_NOISE_STEP = 2**30
_BATCH_ROLLOUTS = 160
Evaluator = Callable[..., tuple[dict[str, float], list[dict], list[dict]]]
# (prompts that are complete, prompts) → None
OnProgress = Callable[[int, int], None]


class Scoring(NamedTuple):
  """From held-out completions to scores and answers."""

  pool: ScorePool
  right: float = 1.0  # the score from which a completion is correct
  read_answer: Callable[[str], Hashable] | None = None  # None: no parser is known for the answers
  episodes: multi_turn.Episodes | None = None  # None: completions are single turns


def make_evaluator(
  spec: StepSpec,
  table: data.PromptTable,
  decode: Callable[[Sequence[int]], str],
  scoring: Scoring,
  samples: int,
  sampling: SamplingConfig | Settings,
) -> Evaluator:
  """Return evaluate(params, head=None, on_progress=None) → (metrics, rows, groups), compiled once.

  `table` holds the held-out prompts, `decode` turns token ids into text; `sampling` holds temperature, top_k, top_p,
  min_p of the samples. Metrics are val-core/<source>/acc/{greedy, mean@n, best@n, pass@n, maj@n, vote@n}, groups those
  of `evaluation.tally.groups`. `head` is the correctness head of the train state, for vote@n where rollouts are pruned.
  With `scoring.episodes` prompts are episodes of its environment with all turns that it allows. `on_progress` is called
  after each batch of prompts.
  """
  sampler = _make_sampler(spec, table, decode, scoring.episodes, samples, sampling)
  pruning = spec.rollout.pruning
  # A correctness head that never learns gives every completion the same probability.
  weighs_votes = samples and pruning is not None and pruning.learning_rate > 0
  predict = programs.compile_predict_success(trained_weights_spec(spec)) if weighs_votes else None
  descriptions = _describe(table.rows)

  def evaluate(
    params: Params, head: Any = None, on_progress: OnProgress | None = None
  ) -> tuple[dict[str, float], list[dict], list[dict]]:
    predict_samples = None
    if predict is not None and head is not None:
      predict_samples = functools.partial(predict, params, head)
    everything = _complete(sampler, params, predict_samples, on_progress)
    records = []
    for kind, completions in _by_kind(everything, samples).items():
      score_PxN = _scores(completions, table.rows, scoring)
      for p, description in enumerate(descriptions):
        record = dict(kind=kind) | description
        record |= dict(output=completions.full_texts[p], score=score_PxN[p].tolist())
        if scoring.read_answer is not None:
          record['answer'] = _answers(completions.texts[p], scoring.read_answer)
        if completions.trust_PxN is not None:
          record['trust'] = completions.trust_PxN[p].tolist()
        records.append(record)
    groups = evaluation.tally.groups(records, scoring.right)
    return evaluation.tally.metrics(groups), records, groups

  return evaluate


class _Sampler(NamedTuple):
  """A compiled program that completes all held-out prompts, in batches."""

  fn: Callable
  spec: StepSpec  # of the program
  table: data.PromptTable
  decode: Callable[[Sequence[int]], str]
  episodes: multi_turn.Episodes | None
  batch_prompts: int


def _make_sampler(
  spec: StepSpec,
  table: data.PromptTable,
  decode: Callable[[Sequence[int]], str],
  episodes: multi_turn.Episodes | None,
  samples: int,
  sampling: SamplingConfig | Settings,
) -> _Sampler:
  """The sampler of a greedy completion of each prompt and `samples` others, in batches of nearly equal sizes."""
  if samples:
    token_filter = TokenFilter(*(sampling[k] for k in TokenFilter._fields))
    spec = evaluation_spec(spec, samples, sampling['temperature'], token_filter)
  else:
    spec = evaluation_spec(spec, 0, temperature=0.0)
  # An environment's first observation changes prompts, which may then begin otherwise.
  tokens = table.tokens if episodes is None else ()
  prefix = prompt_prefix.shared_tokens(tokens, spec.layout.mesh.devices.flat[0].platform)
  shards, count = sharding.rows_shards(spec.layout.mesh), len(table.rows)
  batches = -(-count // max(_BATCH_ROLLOUTS // (1 + samples), shards)) or 1
  size = -(-count // (batches * shards)) * shards
  spec = spec._replace(layout=spec.layout._replace(prefix_tokens=prefix, prompts=size))
  spec = device_memory.with_slots_that_fit(spec)
  return _Sampler(programs.compile_generate(spec), spec, table, decode, episodes, size)


class _Completions(NamedTuple):
  """Completions of every prompt, in order."""

  texts: list[list[str]]  # as graded: with several turns, one of them
  full_texts: list[list[str]]  # all turns and observations
  turns: Turns | None  # of all rows
  trust_PxN: np.ndarray | None  # P(correct) of samples by the correctness head


def _by_kind(everything: _Completions, samples: int) -> dict[str, _Completions]:
  """The greedy completions, which come first for each prompt, and the samples where there are any."""

  def part(columns: slice) -> _Completions:
    return _Completions(
      [texts[columns] for texts in everything.texts],
      [texts[columns] for texts in everything.full_texts],
      _rows_of(everything.turns, 1 + samples, columns),
      everything.trust_PxN if columns.start else None,
    )

  kinds = dict(greedy=part(slice(0, 1)))
  return kinds | dict(sampled=part(slice(1, None))) if samples else kinds


def _rows_of(tree: Params, each: int, columns: slice) -> Params:
  """Arrays [P * each, …] cut to those rows of each prompt."""

  def cut(x):
    chosen = x.reshape(len(x) // each, each, *x.shape[1:])[:, columns]
    return chosen.reshape(chosen.shape[0] * chosen.shape[1], *x.shape[1:])

  return jax.tree.map(cut, tree)


def _complete(
  sampler: _Sampler,
  params: Params,
  predict: Callable | None,
  on_progress: OnProgress | None = None,
) -> _Completions:
  """Samples batch by batch; the last batch is filled up with the first prompt."""
  table, episodes, size = sampler.table, sampler.episodes, sampler.batch_prompts
  count, each = len(table.rows), 1
  texts, full_texts, turns, trust = [], [], [], []
  for start in range(0, count, size):
    index = np.arange(start, start + size)
    chosen = np.where(index < count, index, 0)
    prompts = table.prompts(chosen, born=_NOISE_STEP)._replace(index_P=index.astype(np.int32))
    rollout = _rollout(sampler, params, prompts, [table.rows[i] for i in chosen])
    rows = zip(rollout.tokens_BxT, rollout.length_B, strict=True)
    decoded = graded = [sampler.decode(t[:n].tolist()) for t, n in rows]
    if episodes is not None:
      numbers = multi_turn.turns_of(rollout).number_BxT
      turn_rows = zip(rollout.tokens_BxT, numbers, strict=True)
      graded = [episodes.graded_text(*row) for row in turn_rows]
    each = len(decoded) // size
    texts += _by_prompt(graded, each)
    full_texts += _by_prompt(decoded, each)
    turns.append(rollout.turns)
    if predict is not None:
      samples = _rows_of(rollout, each, slice(1, None))
      trust += _by_prompt(sharding.fetch(predict(prompts, samples)), each - 1)
    if on_progress is not None:
      on_progress(min(start + size, count), count)
  joined = None
  if episodes is not None:
    joined = Turns(*(np.concatenate(x)[: count * each] for x in zip(*turns, strict=True)))
  trust_PxN = None if predict is None else np.array(trust[:count])
  return _Completions(texts[:count], full_texts[:count], joined, trust_PxN)


def _by_prompt(values: Sequence[Any], each: int) -> list[Any]:
  return [values[start : start + each] for start in range(0, len(values), each)]


def _rollout(sampler: _Sampler, params: Params, prompts: Prompts, rows: Sequence[Row]) -> Rollout:
  """The rollout of a batch: one call, or one for every turn of an environment's episodes."""
  spec, episodes, seed = sampler.spec, sampler.episodes, np.int32(sampler.spec.seed)
  if episodes is None:
    longest = max(map(len, sampler.table.tokens))
    prompts = prompts._replace(tokens_PxL=prompts.tokens_PxL[:, :longest])
    return sharding.fetch(sampler.fn(params, prompts, seed, None))
  rollouts = spec.rollout.decode.rollouts
  prompts = episodes.open(prompts, rows, prompts.tokens_PxL.shape[1], rollouts)
  sample = lambda begun: (sharding.fetch(sampler.fn(params, prompts, seed, begun)), {})  # noqa: E731
  begun = empty_records.empty_rollout(spec, len(rows))
  limits = multi_turn.Limits(spec.rollout.decode.max_tokens, episodes.max_turns)
  return episodes.play(sample, prompts, rows, begun, limits)[0]


def _scores(completions: _Completions, rows: Sequence[Row], scoring: Scoring) -> np.ndarray:
  """The score [P, N] of every completion."""
  flat_rows = [row for row, texts in zip(rows, completions.texts, strict=True) for _ in texts]
  flat_texts = [text for texts in completions.texts for text in texts]
  grade = lambda: scoring.pool.score(flat_rows, flat_texts)  # noqa: E731
  if scoring.episodes is None or completions.turns is None:
    scores = grade()
  else:
    scores = scoring.episodes.score(completions.turns, grade, 1)
  return scores.reward_B.reshape(len(rows), -1)


def _answers(texts: Sequence[str], read: Callable[[str], Hashable]) -> list[str | None]:
  """The answers as words; equal answers get the words of the first one, so that words compare as values do."""
  words: dict[Hashable, str] = {}
  return [
    None if (answer := read(text)) is None else words.setdefault(answer, str(answer))
    for text in texts
  ]


def _describe(rows: Sequence[Row]) -> list[JsonObject]:
  """The fields of a record that are of its prompt."""
  return [
    dict(
      id=row.id,
      source=row.source,
      level=level,
      question=row.question or list(row.messages),
      gts=row.answer,
    )
    for row, level in zip(rows, levels(rows), strict=True)
  ]
