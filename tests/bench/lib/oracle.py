"""An oracle for real runs: before each step it samples many more prompts at no cost, and takes the best."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm.config.schema import RewardsConfig
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.curriculum.records import Proposal
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import prompt_encoding, sharded_grading
from jaxrl_llm.runner.context import RunContext
from jaxrl_llm.runner.grading import grade
from jaxrl_llm.types import TrainState

_SEED = 1_000_003  # of the scan, whose noise is not that of the rollouts


class Scan:
  """Success rates of random candidates by the weights after each step, from one group of rollouts each."""

  def __init__(self, context: RunContext, pool: sharded_grading.Pool, multiple: int):
    """`multiple`: candidates for each prompt of a step."""
    self.context, self.pool, self.multiple = context, pool, multiple
    self.generate = programs.compile_generate(context.spec)
    self.seed = np.int32(_SEED + context.config.seed)
    self.index_M, self.rate_M = np.zeros(0, np.int32), np.zeros(0)

  def __call__(self, step: int, state: TrainState, index_P: np.ndarray) -> None:
    """Measure the candidates of the next step; takes the place of `prompt_encoding`'s call."""
    table, spec = self.context.tables.train, self.context.spec
    weights, block = train_state.sampling_weights(spec, state), len(index_P)
    random = np.random.default_rng((int(self.seed), step))
    self.index_M = random.choice(len(table), self.multiple * block, replace=False).astype(np.int32)
    rates = []
    for part in self.index_M.reshape(-1, block):
      prompts = table.prompts(part, born=step)
      rollout = sharding.fetch(self.generate(weights, prompts, self.seed, None))
      batch = grade(self.context, self.pool, prompts, rollout).batch
      rates.append(batch.correct_B.reshape(block, -1).mean(1))
    self.rate_M = np.concatenate(rates)


class Oracle:
  """`Curriculum.propose` by the rates of a scan: those nearest to one half; before the first scan, random prompts."""

  def __init__(self, curriculum: Curriculum, scan: Scan):
    self.curriculum, self.scan = curriculum, scan

  def __call__(self, step: int, slots: int, lengths=None, hinted=None, busy=()) -> Proposal:
    del lengths, hinted
    free_M = ~np.isin(self.scan.index_M, busy)
    index_M, rate_M = self.scan.index_M[free_M], self.scan.rate_M[free_M]
    if not len(index_M):
      index_M = np.random.default_rng((int(self.scan.seed), step)).permutation(self.curriculum.size)
      rate_M = np.full(len(index_M), np.nan)
    worth_M = 4 * rate_M * (1 - rate_M)
    at = np.argsort(-worth_M, kind='stable')[:slots]
    index = index_M[at].astype(np.int32)
    mean, _, mixed = self.curriculum.predict(index)
    return Proposal(index, mean, mixed, worth_M[at], float(worth_M.mean()), ('picked',) * len(at))


@contextlib.contextmanager
def chosen_by_oracle(settings: RewardsConfig, multiple: int) -> Iterator[None]:
  """Runs of `train.run` within take the prompts of an oracle, from `multiple` times as many.

  `settings`: config.rewards of the run.
  """
  original = prompt_encoding.compile_call
  with rewards.Pool(settings) as workers:

    def compile_call(context: RunContext) -> Scan:
      scan = Scan(context, sharded_grading.Pool(workers), multiple)
      curriculum = context.selection.curriculum
      curriculum.propose = Oracle(curriculum, scan)
      return scan

    prompt_encoding.compile_call = compile_call
    try:
      yield
    finally:
      prompt_encoding.compile_call = original
