"""Shapes of a step that step_time measures: prompts, lengths, and which groups are mixed, equal on both sides.

Nothing here imports jax or torch: the workers of both sides do.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

STEPS = 64  # steps' worth of different prompts; the sides walk through them in the same order
FULL, NATURAL, FORCED = 'full', 'natural', 'forced'  # lengths of completions


class Shape(NamedTuple):
  """One kind of step."""

  title: str
  lengths: str  # FULL: T tokens; NATURAL: up to the end token; FORCED: by prompt and rollout
  mixed: float  # share of the groups whose rewards differ
  prompt_tokens: int  # L, the most tokens of a prompt
  completion_tokens: int  # T
  trl: dict[str, Any]  # fields of GRPOConfig
  microbatches: tuple[int, ...]  # of TRL and Tunix, to try
  tunix: dict[str, Any] | None = None  # fields of its GRPOConfig; None: it cannot do the same work
  config: str = ''  # of this program, a file of configs/
  prompts: int = 4  # P
  rollouts: int = 8  # G
  mean_tokens: float = 0.0  # FORCED: mean of the log-normal distribution, before the cap
  sigma: float = 1.0  # FORCED: standard deviation of the logarithm


_DAPO = dict(loss_type='dapo', epsilon=0.2, epsilon_high=0.28)
SHAPES = {
  'full': Shape(
    title='All completions have 32 tokens, and every group is mixed',
    lengths=FULL,
    mixed=1.0,
    prompt_tokens=64,
    completion_tokens=32,
    trl=dict(loss_type='grpo'),
    microbatches=(32, 16, 8),
    tunix=dict(loss_agg_mode='sequence-mean-token-mean'),
  ),
  'default': Shape(
    title="The default job's prompts; completions end by themselves, and 54 % of the groups are mixed",
    lengths=NATURAL,
    mixed=0.54,
    prompt_tokens=56,
    completion_tokens=16,
    trl=_DAPO,
    microbatches=(32, 16, 8),
    tunix=dict(loss_agg_mode='token-mean'),
    config='dapo',
  ),
  'long': Shape(
    title='Log-normal lengths, at most 256 tokens, and half of the groups are mixed',
    lengths=FORCED,
    mixed=0.5,
    prompt_tokens=64,
    completion_tokens=256,
    trl=_DAPO,
    microbatches=(8, 4),  # 32 rows would need more memory than most machines have
    config='dapo',
    mean_tokens=64.0,
  ),
}
# Of smoke runs, for a model of characters that has seen no words.
_TINY = {
  'full': dict(completion_tokens=8),
  'default': dict(prompt_tokens=16, completion_tokens=8),
  'long': dict(completion_tokens=24, mean_tokens=8.0),
}


def shape(name: str, is_tiny: bool) -> Shape:
  """The shape of that name, with few tokens for smoke runs."""
  if not is_tiny:
    return SHAPES[name]
  return SHAPES[name]._replace(**_TINY[name], microbatches=(32,))


class Job(NamedTuple):
  """A shape with its prompts, as the workers of both sides read it."""

  shape: Shape
  end_ids: tuple[int, ...]  # tokens that end a completion
  prompts: list[Any]  # text, or messages for the chat template
  ids: list[list[int]]  # token ids of each prompt
  mixed: list[bool]  # whether a prompt's group is mixed
  lengths: list[list[int]]  # FORCED: tokens of each completion [N, G]; else empty

  def reward(self, prompt: int, rollout: int, text: str) -> float:
    """A hash in [0, 1), in which any two rollouts differ; 0 for all rollouts of a group that is not mixed."""
    if not self.mixed[prompt]:
      return 0.0
    return zlib.crc32(f'{prompt} {rollout} {text}'.encode()) / 2**32

  def step_prompts(self, number: int) -> np.ndarray:
    """The prompts of a side's n-th step, int32 [P]."""
    P = self.shape.prompts
    return np.arange(number * P, number * P + P, dtype=np.int32) % len(self.ids)

  def prompt_tokens(self, index_P: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of these prompts, padded with 0 on the right, int32 [P, L], and their lengths, int32 [P]."""
    tokens_PxL = np.zeros((len(index_P), self.shape.prompt_tokens), np.int32)
    for row_L, index in zip(tokens_PxL, index_P, strict=True):
      row_L[: len(self.ids[index])] = self.ids[index]
    return tokens_PxL, np.array([len(self.ids[i]) for i in index_P], np.int32)

  def caps(self, index_P: Sequence[int] | np.ndarray) -> np.ndarray:
    """The most tokens of each rollout of these prompts, int32 [B]."""
    G, T = self.shape.rollouts, self.shape.completion_tokens
    rows = [self.lengths[p] if self.lengths else [T] * G for p in index_P]
    return np.array(rows, np.int32).ravel()


def write_job(path: pathlib.Path, job: Job) -> None:
  path.write_text(json.dumps(job._asdict() | dict(shape=job.shape._asdict())))


def read_job(path: pathlib.Path) -> Job:
  fields = json.loads(path.read_text())
  shape = Shape(**fields['shape'])
  shape = shape._replace(microbatches=tuple(shape.microbatches))
  return Job(**fields | dict(shape=shape, end_ids=tuple(fields['end_ids'])))


def mixed_groups(count: int, share: float) -> list[bool]:
  """Which of `count` groups are mixed: spread evenly, so that all steps have nearly the same number of them."""
  return [int((i + 1) * share + 1e-9) > int(i * share + 1e-9) for i in range(count)]


def forced_lengths(shape: Shape, count: int) -> list[list[int]]:
  """Log-normal lengths in [2, T] by (prompt, rollout): [count, G]."""
  mu = np.log(shape.mean_tokens) - shape.sigma**2 / 2
  draw = lambda p: np.random.default_rng((7, p)).lognormal(mu, shape.sigma, shape.rollouts)  # noqa: E731
  rows = [np.clip(np.rint(draw(p)), 2, shape.completion_tokens) for p in range(count)]
  return [[int(n) for n in row] for row in rows]
