"""The records of the host loop: the run context, and what passes between the stages of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import curriculum, data, replay, rewards
from jaxrl_llm.config.schema import Config, RewardsConfig
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.monitoring import alarms
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.rewards.pool import ScorePool as ScorePool
from jaxrl_llm.runner import endpoint, hints, multi_turn, teacher_text, token_stats
from jaxrl_llm.types import (
  Array,
  Batch,
  JsonObject,
  Model,
  Params,
  Prompts,
  Rollout,
  TrainState,
)


class Models(NamedTuple):
  """The models as loaded: parameters on the host, before training."""

  policy: Model
  teacher: Model | None  # of config.objective.teacher
  adapter: Params  # of config.lora.init; None: a fresh adapter, or no LoRA


class Selection(NamedTuple):
  """Which prompts a step samples, in how many slots, with which hints and length cap."""

  curriculum: curriculum.Curriculum
  lengths: curriculum.LengthEstimate
  allocate: Callable[..., curriculum.allocation.Allocation]  # (α, β, lengths, slots, G) → slots
  hints: hints.HintProvider | None  # None: prompts carry no hints
  length_cap: Callable[..., int] | None  # (step, T) → the most tokens of a completion; None: T


class ReplayBuffers(NamedTuple):
  """Rollouts that outlive their step. None: no rollouts of that kind do."""

  unfinished: replay.PartialRollouts | None
  drafts: replay.Drafts | None
  reuse: replay.reuse.Store | None
  collector: replay.Collector | None  # None: every graded batch is learned from as it is


class Grading(NamedTuple):
  """From completions to rewards."""

  rewards: tuple[rewards.Part, ...]  # config.rewards.fn, then config.rewards.parts
  vote: rewards.majority_vote.Majority | None  # None: the labels of the data decide correctness
  labels: curriculum.LabelRefiner | None  # None: labels are never replaced
  read_answer: Callable[[str], Any] | None  # text → its answer, for `labels`
  truncate: rewards.length_truncation.Outliers | None  # None: completions are never shortened
  failures: rewards.FailurePolicy  # policy for completions that could not be graded
  scale: outcomes.Scale  # from scores to success


class RunContext(NamedTuple):
  """A validated run: config, models, data, compiled-step specification and host-side state."""

  config: Config
  models: Models
  spec: StepSpec
  tables: data.Tables
  selection: Selection
  replay: ReplayBuffers
  grading: Grading
  health: alarms.Health
  # None: a completion is a single turn
  episodes: multi_turn.Episodes | endpoint.HarnessEpisodes | None = None
  token_stats: token_stats.TokenStats | None = None  # None: rollout files hold no per-token values
  teacher_text: teacher_text.TeacherText | None = None  # None: no teacher with another tokenizer

  @property
  def held_out_rewards(self) -> RewardsConfig:
    """The grading of held-out prompts: config.rewards, or the verifier of config.evaluation.benchmark."""
    settings, verifier = self.config.rewards, self.tables.held_out.verifier
    return rewards.with_function(settings, verifier) if verifier else settings


class Choice(NamedTuple):
  """Prompts for the free slots of a step."""

  prompt_index: np.ndarray  # int [slots]: prompts that wait for rollouts or are due, then new ones
  part: np.ndarray  # int32 [slots]: which of its prompt's slots
  weight: np.ndarray  # float32 [slots]: loss weight of the slot's completions
  record: JsonObject  # a row of choices.jsonl: each new prompt once, with its scores


class EncodedPrompts(NamedTuple):
  """Hidden states of prompts at their last token, some of which may occur twice."""

  index_M: np.ndarray  # rows of the data set
  hidden: tuple[Array, ...]  # float32 [P, D] each, M = P · their number


class PendingStep(NamedTuple):
  """A call of the compiled step whose rollouts are not graded yet."""

  step: int
  prompts: Prompts
  rollout: Rollout
  device_metrics: Mapping[str, Array]
  trained_batch: Batch | None = None  # the batch of this call's update; None after a restart
  encoded: EncodedPrompts | None = None  # None: no prior reads hidden states of prompts
  # float32 [B], of completions with a hint: `learner.hint_reliance`. None: there are none, or nothing reads it
  reliance_B: Array | None = None


class ReceivedStep(NamedTuple):
  """A step whose rollouts are on the host, without its unfinished groups."""

  pending: PendingStep
  finished_P: np.ndarray  # bool: which groups are finished
  metrics: dict[str, float]  # of the groups that are not
  begun: Callable[[], rewards.Scores] | None = None  # waits for scores that are computed meanwhile


class Landed(NamedTuple):
  """A graded step."""

  batch: Batch
  metrics: dict[str, float]  # a row of metrics.jsonl
  rollout_records: list[JsonObject]  # rows of the rollout file


class Progress(NamedTuple):
  """Training state between two steps."""

  state: TrainState
  batch: Batch  # of the next update
  pending: PendingStep | None  # in lag mode the newest step, received while the next one runs
  done: int  # steps taken
  received: tuple[ReceivedStep, ...] = ()  # steps that are graded meanwhile, the oldest first
