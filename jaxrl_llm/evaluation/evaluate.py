"""Accuracy on held-out prompts: one greedy answer each, and n samples: their mean and best, pass@k, votes.

A file of eval/ is a JSON object:

  version, model, grader, settings   what it is of, see `asked`
  weights   `fingerprint` of the parameters that answered
  step      of the run, 0 for the model as loaded
  metrics   val-core/<source>/acc/<measure> → a number, with <source> 'all' for all prompts
  groups    the same with intervals, by source and by level, and curves over k: see `measure.tally.groups`
  rows      every prompt and answer

A row is one prompt answered in one way:

  kind      'greedy' or 'sampled'
  id        of the prompt, a hash of source, question and answer
  source    that of the data
  level     how hard the prompt says it is, such as 'length=3'; '' where it does not say
  question  as text or messages
  gts       the answer it should have
  output    its answers
  score     of each, as the grader gave it
  answer    in each of them what the grader compares, '…' or None; only where the grader tells
  trust     how likely each is right, as the judge of config.rollout.pruning had it; only of samples, where there is one
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import evaluation
from jaxrl_llm.config import stages
from jaxrl_llm.data import pipeline
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner.step_spec import StepSpec, evaluation_spec, trained_weights_spec
from jaxrl_llm.rewards.parsing import extract
from jaxrl_llm.rollout.sampling import TokenFilter
from jaxrl_llm.runner import multi_turn
from jaxrl_llm.types import Prompts, Rollout, Row, Turns

# Evaluation draws its noise under a step number that training never reaches, the same every time:
# before and after are paired.
_NOISE = 2**30
_BATCH_ROLLOUTS = 128
_LEVEL_ROWS = 4  # a trait with fewer rows a value tells rows apart, and not levels
_LEVELS = 32  # of a source at most


class Judging(NamedTuple):
  """How texts become scores, and which answers are equal."""

  pool: Any  # grade.Pool
  right: float = 1.0  # the score from which an answer is right
  read: Callable[[str], Hashable] | None = None  # what the grader compares; None: it does not tell
  play: multi_turn.Play | None = None  # an environment that answers


def make_evaluator(
  spec: StepSpec, table: Any, decode: Callable, judging: Judging, samples: int, sampling: Any
) -> Callable:
  """Returns evaluate(params, judge=None) → (metrics, rows, groups), compiled once for greedy and once for sampling.

  `table` holds the held-out prompts, `decode` turns token ids into text; `sampling` holds temperature, top_k, top_p,
  min_p of the samples. Metrics are val-core/<source>/acc/{greedy, mean@n, best@n, pass@n, maj@n, vote@n}, groups those
  of `measure.tally.groups`. `judge` is that of the train state, for vote@n in a program that prunes. With
  `judging.play` prompts are episodes of its environment, all turns it allows. Source: none.
  """
  asks = _asks(spec, table, decode, judging.play, samples, sampling)
  # A judge that never learns says the same of all.
  listens = samples and spec.rollout.pruning is not None and spec.rollout.pruning.learning_rate > 0
  trust = programs.compile_predict_success(trained_weights_spec(spec)) if listens else None
  about = _about(table.rows)

  def evaluate(params: Any, judge: Any = None) -> tuple[dict[str, float], list[dict], list[dict]]:
    rows = []
    for kind, ask in asks.items():
      heard = kind == 'sampled' and trust and judge is not None
      said = _said(ask, params, functools.partial(trust, params, judge) if heard else None)
      score_PxN = _scores(said, table.rows, judging)
      for i, row in enumerate(about):
        told = dict(kind=kind) | row | dict(output=said.shown[i], score=score_PxN[i].tolist())
        if judging.read is not None:
          told['answer'] = _answers(said.texts[i], judging.read)
        rows.append(told | (dict(trust=said.trust_PxN[i].tolist()) if heard else {}))
    groups = evaluation.tally.groups(rows, judging.right)
    return evaluation.tally.metrics(groups), rows, groups

  return evaluate


class _Ask(NamedTuple):
  """One way of answering all prompts."""

  fn: Callable  # the compiled program
  spec: StepSpec  # that it was made of
  table: Any
  decode: Callable
  play: multi_turn.Play | None
  size: int  # prompts of a call


def _asks(spec: StepSpec, table: Any, decode, play, samples: int, sampling) -> dict[str, _Ask]:
  """kind → how it is asked for."""
  shards = sharding.rows_shards(spec.layout.mesh)
  size = max(_BATCH_ROLLOUTS // max(samples, 1), shards)
  size = min(size, len(table.rows) + shards - 1) // shards * shards
  kinds = {'greedy': evaluation_spec(spec, 1, 0.0)}
  if samples:
    token_filter = TokenFilter(*(sampling[k] for k in TokenFilter._fields))
    kinds['sampled'] = evaluation_spec(spec, samples, sampling['temperature'], token_filter)
  return {
    kind: _Ask(programs.compile_generate(one), one, table, decode, play, size)
    for kind, one in kinds.items()
  }


class _Said(NamedTuple):
  """All answers to every prompt, in order."""

  texts: list[list[str]]  # what is graded
  shown: list[list[str]]  # all of it, an environment's answers too
  turns: Turns | None  # of rows
  trust_PxN: np.ndarray | None  # how likely each is right


def _said(ask: _Ask, params: Any, trust: Callable | None) -> _Said:
  """The last batch is filled up with the first prompt."""
  table, play, size = ask.table, ask.play, ask.size
  count, texts, shown, turns, trusted = len(table.rows), [], [], [], []
  for start in range(0, count, size):
    index = np.arange(start, start + size)
    chosen = np.where(index < count, index, 0)
    prompts: Prompts = table.prompts(chosen, born=_NOISE)._replace(index_P=index.astype(np.int32))
    rollout = _rollout(ask, params, prompts, [table.rows[i] for i in chosen])
    said = zip(rollout.tokens_BxT, rollout.length_B, strict=True)
    decoded = last = [ask.decode(t[:n].tolist()) for t, n in said]
    if play is not None:
      numbers = rollout.turns.number_BxT
      last = [play.texts(*one)[-1] for one in zip(rollout.tokens_BxT, numbers, strict=True)]
    each = len(decoded) // size
    by_prompt = lambda x: [x[i * each : (i + 1) * each] for i in range(size)]  # noqa: B023, E731
    texts, shown = texts + by_prompt(last), shown + by_prompt(decoded)
    turns.append(rollout.turns)
    if trust is not None:
      trusted += by_prompt(sharding.fetch(trust(prompts, rollout)))
  joined = play and Turns(*(np.concatenate(x)[: count * each] for x in zip(*turns, strict=True)))
  trust_PxN = None if trust is None else np.array(trusted[:count])
  return _Said(texts[:count], shown[:count], joined, trust_PxN)


def _rollout(ask: _Ask, params: Any, prompts: Prompts, rows: Sequence[Row]) -> Rollout:
  """A batch's rollouts: one call, or the rounds of an environment's episodes."""
  spec, play, seed = ask.spec, ask.play, np.int32(ask.spec.seed)
  if play is None:
    return sharding.fetch(ask.fn(params, prompts, seed, None))
  prompts = play.opened(prompts, rows, prompts.tokens_PxL.shape[1])
  sample = lambda begun: (sharding.fetch(ask.fn(params, prompts, seed, begun)), {})  # noqa: E731
  begun = empty_records.empty_rollout(spec, len(rows))
  limits = multi_turn.Limits(spec.rollout.decode.max_tokens, play.most)
  return play.finish(sample, prompts, rows, begun, limits)[0]


def _scores(said: _Said, rows: Sequence[Row], judging: Judging) -> np.ndarray:
  """The score [P, N] of every answer."""
  flat = [row for row, answers in zip(rows, said.texts, strict=True) for _ in answers]
  ask = lambda: judging.pool.score(flat, [t for answers in said.texts for t in answers])  # noqa: E731
  scores = ask() if judging.play is None else judging.play.scores(said.turns, ask, 1)
  return scores.reward_B.reshape(len(rows), -1)


def _answers(texts: Sequence[str], read: Callable[[str], Hashable]) -> list[str | None]:
  """What is compared, in words: of equal values those of the first, so that equal words are equal values."""
  words: dict[Hashable, str] = {}
  return [
    None if (found := read(text)) is None else words.setdefault(found, str(found)) for text in texts
  ]


def _about(rows: Sequence[Row]) -> list[dict[str, Any]]:
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


def levels(rows: Sequence[Row]) -> list[str]:
  """How hard each row says it is, '' where it does not say.

  A `level` or `difficulty` of its own, be it a word or a number, also inside metadata or extra_info; else 'trait=value'
  of the whole-number traits that rows of its source share (number of terms, length). Source: none.
  """
  told = [
    _own_level(row) or ' '.join(shared) for row, shared in zip(rows, _shared(rows), strict=True)
  ]
  of_source = collections.defaultdict(set)
  for row, level in zip(rows, told, strict=True):
    of_source[row.source].add(level)
  return [
    level if len(of_source[row.source]) <= _LEVELS else ''
    for row, level in zip(rows, told, strict=True)
  ]


def _own_level(row: Row) -> str:
  places = [row.extra, *(row.extra.get(name) for name in ('metadata', 'extra_info'))]
  found = [
    place.get(key) for place in places if isinstance(place, dict) for key in ('level', 'difficulty')
  ]
  return next((str(value) for value in found if isinstance(value, str | int | float)), '')


def _shared(rows: Sequence[Row]) -> list[list[str]]:
  """Of each row the traits that mark a level: several values in its source, each of several rows."""
  traits = pipeline.levels(rows)
  count = collections.Counter((source, trait) for source, *own in traits for trait in own)
  values = collections.defaultdict(list)
  for (source, trait), rows_of in count.items():
    values[source, trait.partition('=')[0]].append(rows_of)
  marks = {name for name, of in values.items() if len(of) > 1 and np.mean(of) >= _LEVEL_ROWS}
  return [[t for t in own if (source, t.partition('=')[0]) in marks] for source, *own in traits]


def fingerprint(params: Any) -> str:
  """16 hexadecimal digits of a tree's names, shapes, types and bits; the same however it is cut over devices."""
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    total = int(sharding.fetch(_bits(leaf)))
    digest.update(f'{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {total}\n'.encode())
  return digest.hexdigest()[:16]


_WORD = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.jit
def _bits(x: jax.Array) -> jax.Array:
  """Σ mix(bits ⊕ place) mod 2³²: whole numbers, so that the order of the sum does not matter.

  The mix is murmur3's finalizer: of a plain weighted sum, a sign turned in an even number of places would be lost.
  """
  whole = jnp.issubdtype(x.dtype, jnp.integer)
  bits = x if whole else jax.lax.bitcast_convert_type(x, _WORD[x.dtype.itemsize])
  place = jnp.zeros(x.shape, jnp.uint32)
  for axis in range(x.ndim):
    stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
    place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
  mixed = bits.astype(jnp.uint32) ^ (place * jnp.uint32(0x9E3779B9))
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
  return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)


def asked(config: Any, table: Any) -> dict[str, Any]:
  """What an evaluation is of: fields of its file, and an evaluation of others is not this one.

  `grader` decides what is right, `settings` what is asked: two evaluations with one grader, of the same prompts, may be
  compared. Source: none.
  """
  left = (
    'workers',
    'deadline_s',
    'cpu_s',
    'memory_mb',
    'failed',
  )  # how it is run, not what is right
  of = lambda decode_settings: {
    k: v for k, v in json.loads(decode_settings.to_json()).items() if k not in left
  }  # noqa: E731
  settings = dict(
    prompts=table.fingerprint, samples=config.evaluation.samples, **config.evaluation.sampling
  )
  settings |= dict(completion_tokens=config.completion_tokens, seed=config.seed)
  grader = of(config.rewards)
  if config.environment.fn != 'none':
    grader['environment'] = of(config.environment)
  return dict(
    version=evaluation.compare.VERSION, model=config.model, grader=grader, settings=settings
  )


def judging_of(config: Any, pool: Any, play: multi_turn.Play | None) -> Judging:
  """From a config: votes are counted where config.rewards.fn tells what it compares. Source: none."""
  unread = play is not None and play.judge == 'environment'
  read = None if unread else stages.choices(extract).get(config.rewards.fn)
  return Judging(pool, config.rewards.right, read, play)
