"""Sections about prompts and what answers them: data, rewards and environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrl_llm.config.section import Section, Setting, Stage, stage


@dataclasses.dataclass(frozen=True)
class ColumnsConfig(Section):
  """Columns of data.files, where they have other names than usual; a.b is b inside a; '' = the usual name."""

  question: str = ''
  answer: str = ''
  source: str = ''


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
  """Where prompts come from."""

  source: str = 'gym'  # gym, jsonl, files, digits, puzzles, games; another drops tasks and template
  path: str = ''  # of the rows, for jsonl; JSON lines, or another form of data.files
  # for files: each dict(path=, weight=, source=); .parquet, JSON lines, a saved data set's folder, or hub:owner/name
  files: tuple[Mapping[str, Setting], ...] = ()
  eval_path: str = ''  # held-out rows, for jsonl and files; '' = a seeded split
  columns: ColumnsConfig = ColumnsConfig()
  answers: bool = True  # every row must have an answer; False where the reward function needs none
  answer_after: str = ''  # the answer is the text after the last of these marks, such as '####'
  # for gym, digits, puzzles, games: each dict(name=, size=|weight=, <its settings>); gym: reasoning-gym generators
  tasks: tuple[Mapping[str, Setting], ...] = ()
  size: int = 0  # rows of the training set; 0 = all (jsonl, files), 1024 (gym, digits)
  # of these rows, the prompts of RL: in_range(column, above, at_most) keeps those of a difficulty
  keep: Stage = stage('none')
  seed: int = 0
  system: str = ''  # system message of every prompt
  template: str = '{question}'  # the user's message
  chat: bool = True  # apply the model's chat template


@dataclasses.dataclass(frozen=True)
class FailedConfig(Section):
  """Rollouts that could not be graded: score gives them `value`, drop excludes them from the update."""

  timeout: str = 'score'
  crash: str = 'drop'
  error: str = 'drop'
  value: float = 0.0
  # the run stops where more than this share of the rollouts of stop_steps steps failed
  stop_share: float = 0.5
  stop_steps: int = 3


@dataclasses.dataclass(frozen=True)
class RewardsConfig(Section):
  """The reward function `fn`, its settings, and what runs it."""

  fn: str = 'exact'
  right: float = 1.0  # a rollout is right where fn's score is at least this
  # lowest and highest score of fn: the posterior counts a rollout as its share of the way between them, so that graded
  # scores are evidence, too; () = 0 and right. Scores outside count as the nearer bound
  bounds: tuple[float, ...] = ()
  # rewards added to that of fn, each dict(fn=, weight=1.0, …); a group is mixed where the sums differ
  parts: tuple[Mapping[str, Setting], ...] = ()
  workers: int = 2  # processes, for reward functions without a time limit of their own
  deadline_s: float = 10.0  # wall clock, for one completion; a late worker is killed and replaced
  cpu_s: float = 10.0  # processor time for one completion, of all threads
  memory_mb: int = 2048  # that one completion may take in a worker
  failed: FailedConfig = FailedConfig()
  vote: Stage = stage('none')  # majority: the group's most frequent answer replaces the label
  # outliers: the longest of an all-right group are cut, and graded again
  truncate: Stage = stage('none')
  settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)  # of fn


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(Section):
  """What answers a turn: calculator, python, search, a game (guess, walk, pair_walk), discussion, gymnasium, trl, mcp,
  openenv, or 'module:function'.

  With endpoint, your agent makes the requests itself: `harness`='package.module:function', or `command`.
  An environment needs mode='split'. A row holds all turns of an episode and the observations between them.
  """

  fn: str = 'none'
  # most turns of an episode, or requests of a harness; completion_tokens hold them all, with observations
  turns: int = 4
  # turns by step, as rollout.length_schedule: stairs (TTI), cosine
  horizon: Stage = stage('constant')
  # lockstep, or turns: rows decode while others wait for their environments, and only new tokens are encoded;
  # a call ends after `iterations` tokens of each row, or with `ready` turns (0 = a quarter of the rows)
  batching: Stage = stage('lockstep')
  # turns of one step; episodes that go on are continued in the next. 0 = until all are over
  rounds: int = 0
  # what decides whether an episode is right: rewards (of its last turn; of a discussion the first), or environment
  # (sum of its rewards)
  judge: str = 'rewards'
  weight: float = 1.0  # of the environment's rewards beside those of config.rewards
  role: str = 'user'  # of observations in the chat template: user, tool
  observation_tokens: int = 0  # observations are cut to so many; 0 = never
  workers: int = 2  # processes, for environments without a time limit of their own
  # wall clock, for one observation, or the whole run of a harness; a late worker is killed and replaced
  deadline_s: float = 10.0
  cpu_s: float = 10.0  # processor time for the same
  worker_memory_mb: int = 4096  # of all episodes of a worker; 0 = no limit, as browsers need
  settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)  # of fn
