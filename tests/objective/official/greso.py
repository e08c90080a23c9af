"""GRESO: prompts that are skipped for their streaks of zero-variance groups, and the two probabilities that adapt.

The project's `Curriculum` with the config of GRESO runs beside the official filter, its profile of rewards and the
trainer's statements around them: same order of prompts, same uniform numbers, same results of groups of 8.

The official reward is 1 for right and 0.1 for wrong answers, the project's success 1 and 0: the official limits of
mean rewards, 0.98 and 0.11, are rates of 0.978 and 0.011. Groups with the official reward 0, for answers in no format,
are not drawn.

Not covered: the sampling of further groups until a batch is full, and its adaptive size. There the official trainer
moves both probabilities once a batch, by the shares of all its groups; the project moves them after every call. A
window of twice the batch that holds too few unskipped prompts is filled with skipped ones by the project, while the
official trainer reads on. A prompt at the end of one epoch and at the start of the next may be sampled twice in one
official step; the project takes it in a later step. No draw reaches these two.
The objective of the config is not compared.
"""

from __future__ import annotations

import ast
import functools
import types
from typing import Any
from unittest import mock

import numpy as np

from jaxrl_llm.config import loading
from jaxrl_llm.curriculum import (
  Curriculum,
  candidates,
  curriculum,
  eligibility,
  selection,
  slot_assignment,
)
from tests.objective.official import clpo_core, lib, verl_core

FILTER, SLICE = 'verl/trainer/ttis/presampling_selector.py', 'verl/trainer/ttis/ttis.py'
TRAINER, METRICS = 'verl/trainer/ppo/ray_trainer.py', 'verl/trainer/ppo/metric_utils.py'
OFFICIAL = lib.Official(
  'Infini-AI-Lab/GRESO',
  'b27784315479921ea1977178d7e6c4858b2ae5a1',
  (FILTER, SLICE, TRAINER, METRICS),
  'Apache-2.0',
)
N, SLOTS, G = 144, 12, 8  # prompts of the data, prompts of a step, rollouts of each
EPOCHS = 6
# seed → both p at the start (0.5 in the official scripts), shares of easy and of hard groups, steps
CASES = (
  (0.5, 0.15, 0.15, 32),
  (0.5, 0.05, 0.3, 32),
  (0.05, 0.1, 0.18, 24),
  (0.93, 0.03, 0.05, 32),
)
WITHOUT = {'*': 'its inputs are success counts of prompts'}
SEEDS = (0, 1, 2, 3)
# Statements of the trainer, in its order: the rewards of a step, then the two probabilities.
STATEMENTS = (
  (ast.AugAssign, 'easy_data_num += '),
  (ast.AugAssign, 'hard_data_num += '),
  (ast.AugAssign, 'total_num += '),
  (ast.Assign, 'log_index_tensor = '),
  (ast.Assign, 'log_data_source = '),
  (ast.Assign, 'log_reward_tensor = '),
  (ast.Assign, 'log_avg_reward = '),
  (ast.Assign, 'data_id_list = self.data_profiler'),
  (ast.Expr, 'self.data_profiler.add_reward_list('),
  (ast.Assign, 'hard_data_ratio = '),
  (ast.Assign, 'easy_data_ratio = '),
  (ast.If, 'epoch > 0 and'),
  (ast.Assign, 'easy_data_num = 0'),
  (ast.Assign, 'hard_data_num = 0'),
  (ast.Assign, 'total_num = 0'),
)
MUTANTS = {
  'a linear probability': (eligibility, 'state[name] ** streaks_C', 'state[name] * streaks_C'),
  'no floor': (eligibility, 'np.maximum(state[name] ** streaks_C, floor)', 'state[name] ** streaks_C'),
  'easy and hard exchanged': (eligibility, "for name in ('p_easy', 'p_hard')]", "for name in ('p_hard', 'p_easy')]"),
  'no reset of streaks': (eligibility, 'np.minimum(old, _MAX_STREAK - 1) + 1, 0)', 'np.minimum(old, _MAX_STREAK - 1) + 1, old)'),
  'seven of eight are easy': (eligibility, 'easy: float = 0.978', 'easy: float = 0.87'),
  'one of eight is hard': (eligibility, 'hard: float = 0.011', 'hard: float = 0.13'),
  'above the share of easy groups': (eligibility, '-step if met >= most', '-step if met > most'),
  'half of the target each': (eligibility, 'p_easy=target / 3, p_hard=2 * target / 3', 'p_easy=target / 2, p_hard=target / 2'),
  'another start': (eligibility, 'start: float = 0.5', 'start: float = 0.52'),
  'another step': (eligibility, 'step: float = 0.01', 'step: float = 0.011'),
  'lower bound': (eligibility, 'moved, 0.05, 0.95', 'moved, 0.0, 0.95'),
  'upper bound': (eligibility, 'moved, 0.05, 0.95', 'moved, 0.05, 1.0'),
  'the first epoch counts': (eligibility, 'if not evidence.first_V.all():', 'if True:'),
  'skipped with the other probability': (curriculum, '< self._barred(pool)', '< 1 - self._barred(pool)'),
  'the last candidates': (selection, 'return np.arange(min(slots, len(utility)))', 'return np.arange(len(utility))[-slots:]'),
  'all candidates are consumed': (slot_assignment, 'consumed = skipped & (np.arange(len(pool)) < chosen.max(initial=-1))', 'pass'),
  'skipped ones come again': (slot_assignment, 'consumed = skipped & (', 'consumed = ~skipped & ('),
  'one order of all epochs': (candidates, '(seed, 1, epoch)', '(seed, 1, 0)'),
}  # fmt: skip


def draw(seed):
  """Orders of the project's stream; by epoch and prompt, a uniform number and the right ones of 8 rollouts.

  Half of the prompts repeat their first kind of result in 60 % of the later epochs; the others change at random.
  """
  r, (_, easy, hard, _) = np.random.default_rng(seed), CASES[seed]
  orders = [
    candidates.stream(np.ones(N, bool), N, 0, np.full(N, e, np.int32), r, multiple=1)
    for e in range(EPOCHS)
  ]
  kind_ExN = r.choice(3, (EPOCHS, N), p=[easy, hard, 1 - easy - hard])
  steady = r.random((EPOCHS, N)) < np.where(np.arange(N) % 2, 0.6, 0.0)
  kind_ExN = np.where(steady, kind_ExN[0], kind_ExN)
  right = np.select([kind_ExN == 0, kind_ExN == 1], [G, 0], r.integers(1, G, (EPOCHS, N)))
  return dict(
    case=np.array(seed),
    order=np.array(orders),
    uniform=np.round(r.random((EPOCHS, N)), 5),
    right=right,
  )


class Rows:
  """In place of verl's DataProto: arrays by name."""

  def __init__(self, **columns):
    self.non_tensor_batch = columns
    self.batch = {}

  def __len__(self):
    return len(self.non_tensor_batch['index'])

  def select_via_index(self, rows):
    rows = np.asarray(rows, int)
    return Rows(**{name: x[rows] for name, x in self.non_tensor_batch.items()})

  @staticmethod
  def concat(parts):
    names = parts[0].non_tensor_batch
    return Rows(**{x: np.concatenate([p.non_tensor_batch[x] for p in parts]) for x in names})

  def with_rewards(self, torch, reward_PxG):
    """The rollouts of these prompts with their rewards."""
    rows = Rows(**{name: np.repeat(x, G) for name, x in self.non_tensor_batch.items()})
    reward_B = torch.tensor(reward_PxG.reshape(-1))
    rows.batch = dict(reward=reward_B, token_level_scores=reward_B[:, None])
    return rows


class Uniform(float):
  """A uniform number that records the probabilities with which it is compared."""

  bounds: list[float]

  def __new__(cls, value, bounds):
    self = super().__new__(cls, value)
    self.bounds = bounds
    return self

  def __lt__(self, bound):
    self.bounds.append(bound)
    return float.__lt__(self, bound)


class Stream:
  """The official loader with one prompt a batch: `names` hold the epoch, and `torch.rand` the prompt's number."""

  def __init__(self, data, names, rand):
    self.data, self.names, self.rand = data, names, rand

  def __iter__(self):
    for epoch, order in enumerate(self.data['order']):
      self.names['epoch'] = epoch
      for index in order:
        self.rand.value = self.data['uniform'][epoch, index]
        yield Rows(index=np.array([index]), data_source=np.array(['made']), epoch=np.array([epoch]))


def trainer_names(torch, read, data, profiler):
  """The trainer's names before the first step, with its two limits."""
  start = CASES[int(data['case'])][0]
  fields = verl_core.Numbers(
    **dict(dynamic_filtering=True, dynamic_filtering_strategy='all_probabilistic'),
    **dict(target_zero_variance=0.25, p_easy=start, p_hard=start),
  )
  rollout = types.SimpleNamespace(rollout=types.SimpleNamespace(n=G))
  gpus = types.SimpleNamespace(n_gpus_per_node=1)
  config = types.SimpleNamespace(data=fields, actor_rollout_ref=rollout, trainer=gpus)
  own = types.SimpleNamespace(config=config, data_profiler=profiler, p_easy=start, p_hard=start)
  for name in ('targeted_easy', 'targeted_hard'):
    clpo_core.run(clpo_core.statement(read(TRAINER), ast.Assign, f'self.{name} = '), self=own)
  slices = lib.functions(read(SLICE), ('select_batch_slice',), torch=torch)
  return dict(
    **dict(self=own, torch=torch, DataProto=Rows, print=_quiet, acc_batch=None),
    **dict(select_batch_slice=slices.select_batch_slice, adaptive_sampling_bs=SLOTS),
    **dict(skip_log_list=[], easy_data_num=0, hard_data_num=0, total_num=0),
  )


def trainer_code(text):
  """Its loop until a batch is full, and its statements after the rollouts."""
  filtering = clpo_core.statement(text, ast.If, 'Dynamic Filtering: len(acc_batch)')
  loop = ast.parse('for batch in loader:\n  pass\n  break').body[0]
  assert isinstance(loop, ast.For)
  loop.body[0] = filtering
  after = [clpo_core.statement(text, kind, start) for kind, start in STATEMENTS]
  bodies: list[list[ast.stmt]] = [[loop], after]
  return [compile(ast.Module(body, []), '<official>', 'exec') for body in bodies]


def official(torch, read, data):
  """Its steps with one call of rollouts each, then the probability that each prompt is skipped next."""
  rand, bounds = types.SimpleNamespace(value=0.0), []
  number = types.SimpleNamespace(item=lambda: Uniform(rand.value, bounds))
  space = dict(torch=types.SimpleNamespace(rand=lambda _: number), print=_quiet)
  profiler = lib.functions(read(FILTER), ('DataProfiler',), **space).DataProfiler()
  names = trainer_names(torch, read, data, profiler)
  names['loader'] = iter(Stream(data, names, rand))
  metrics = lib.functions(read(METRICS), ('compute_reward_metrics',), torch=torch, print=_quiet)
  full_batch, after_rollouts = trainer_code(read(TRAINER))
  chosen, both = [], []
  for _ in range(CASES[int(data['case'])][-1]):
    exec(full_batch, names)
    assert len(names['batch']) == SLOTS
    index, epoch = (names['batch'].non_tensor_batch[name] for name in ('index', 'epoch'))
    right = np.arange(G)[None] < data['right'][epoch, index][:, None]
    names['batch'] = names['batch'].with_rewards(torch, np.where(right, 1.0, 0.1))
    names['batch_num'] = SLOTS * G
    names['reward_metrics'] = metrics.compute_reward_metrics(names['batch'], None)
    exec(after_rollouts, names)
    chosen.append(index)
    both.append((names['self'].p_easy, names['self'].p_hard))
  skip = []
  for prompt in range(N):
    bounds.clear()
    profiler.easy_probabilistic_skip(0, f'made_{prompt}', p=both[-1][0])
    profiler.hard_probabilistic_skip(0, f'made_{prompt}', p=both[-1][1])
    skip.append(max(bounds))
  return dict(chosen=chosen, p=both, skip=skip)


class Given:
  """In place of a generator: the given numbers as its uniform ones, and its own choices."""

  def __init__(self, numbers):
    self.numbers, self.choice = numbers, np.random.Generator(np.random.PCG64(0)).choice

  def random(self, size):
    assert size == len(self.numbers)
    return self.numbers


@functools.cache
def configured() -> Any:
  """The curriculum of the config."""
  settings: Any = loading.load('greso').curriculum
  return settings.to_dict()


def ours(data):
  """The same by `Curriculum`; the generator of a step has the uniform numbers of its candidates."""
  settings, (start, *_, steps) = configured(), CASES[int(data['case'])]
  if start != 0.5:
    settings = settings | dict(eligibility=dict(fn='streaks', start=start))
  own, fresh = Curriculum(settings, N, group=G), np.random.default_rng
  window = own._stages['candidates']
  chosen, both = [], []
  for step in range(steps):
    passes = own.state_dict()['candidates_passes']
    pool = window(np.ones(N, bool), SLOTS, 0, passes, fresh(0))
    uniform = data['uniform'][passes[pool] % EPOCHS, pool]

    def generator(seed, step=step, uniform=uniform):
      return Given(uniform) if seed == (0, 0, step) else fresh(seed)

    with mock.patch.object(np.random, 'default_rng', generator):
      proposal = own.propose(step, SLOTS)
    own.accept(proposal)
    index = proposal.index
    right = data['right'][passes[index] % EPOCHS, index]
    own.observe(index, right, np.full(SLOTS, G))
    chosen.append(index)
    state = own.state_dict()
    both.append((float(state['gate_p_easy']), float(state['gate_p_hard'])))
  return dict(chosen=np.array(chosen), p=np.array(both), skip=own._barred(np.arange(N)))


def _quiet(*_):
  pass


lib.main(__name__)
