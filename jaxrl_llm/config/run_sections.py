"""Sections about a run rather than a method: evaluation, checkpoints, monitoring, devices and processes."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.config.section import Section, Setting


@dataclasses.dataclass(frozen=True)
class SamplingConfig(Section):
  """How evaluation and --mode=generate sample; training samples the unchanged policy."""

  temperature: float = 1.0  # 0 = greedy
  top_k: int = 0  # 0 = off
  top_p: float = 1.0
  min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(Section):
  """Evaluation on held-out prompts."""

  every: int = 0  # steps between evaluations; 0 = before and after training
  prompts: int = 200  # at most; of a larger set a seeded choice
  # held-out rows of a published benchmark instead of the data's, graded by its own verifier: hub:openai/gsm8k,
  # hub:HuggingFaceH4/MATH-500, hub:HuggingFaceH4/aime_2024, hub:math-ai/aime25, or a local folder or file
  benchmark: str = ''
  samples: int = 4  # per prompt, besides the greedy one
  sampling: SamplingConfig = SamplingConfig()


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section):
  """Checkpoints of the run directory."""

  every: int = 20  # steps between checkpoints
  keep: int = 2  # number of checkpoints on disk


@dataclasses.dataclass(frozen=True)
class ProfileConfig(Section):
  """A device trace for XProf."""

  steps: str = ''  # '10:12' traces steps 10 and 11; '' = none


@dataclasses.dataclass(frozen=True)
class AlarmsConfig(Section):
  """Warnings about the run's health, each raised once when it begins."""

  steps: int = 10  # in a row, for conditions that matter only when they last
  entropy: float = 0.01  # nats per token, below which the policy has collapsed
  # largest mean difference in probability between sampler and trainer; 0 = 1e-4 in float32, 1e-2 in bfloat16, more for
  # rounded weights
  probs_gap: float = 0.0
  truncated: float = 0.95  # largest share of truncated rollouts
  failed: float = 0.1  # largest share of rollouts that could not be graded
  # graded rollouts after which it is an alarm that no score has reached config.rewards.right
  right_rollouts: int = 1024
  # alarms that end the run: non_finite, probs_gap, grading, still, entropy, all_wrong, all_right, same_reward,
  # truncated, never_right, out_of_bounds
  stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PrometheusConfig(Section):
  """The address of the newest metrics, where `trackers` holds prometheus: http://HOST:PORT/metrics."""

  # an address of this machine: 127.0.0.1 is reached from this machine alone, 0.0.0.0 from the network without password
  host: str = '127.0.0.1'
  port: int = 9464  # a different one for each run of a machine


@dataclasses.dataclass(frozen=True)
class MonitoringConfig(Section):
  """What a run prints and writes."""

  # auto: a live table in a terminal, else plain; plain: lines; quiet: warnings only; json: an object a line
  console: str = 'auto'
  # tensorboard, wandb, mlflow, trackio, prometheus: metrics beside metrics.jsonl
  trackers: tuple[str, ...] = ()
  prometheus: PrometheusConfig = PrometheusConfig()
  rollouts_every: int = 1  # steps between rollout files
  # tokens per rollout file with log-prob, advantage and coefficient, about 15 bytes each; 0 = none
  rollouts_tokens: int = 8192
  report_every_s: float = 60.0  # between two versions of report.html; 0 = only at the end
  profile: ProfileConfig = ProfileConfig()
  alarms: AlarmsConfig = AlarmsConfig()


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
  """Devices of a slice along each axis of the mesh; -1 = all that are left."""

  preset: str = ''  # sizes of data and fsdp for a slice: v5e-16, v5e-256, v5p-128, gpu-node, …
  # TPU slices, or nodes of GPUs, that only a slow network connects: each has its own copy of the weights, and the data
  # axis grows by this factor; 0 = as many as the TPUs belong to, 1 for other devices
  slices: int = 0
  data: int = 1  # axis of rows, with a whole copy of the weights each
  # axis of rows, with a part of the weights each, gathered layer by layer in the update
  fsdp: int = -1
  # axis of rows while sampling, and of tokens in the update: for rows too long for one device
  context: int = 1
  expert: int = 1  # axis of rows, with a part of a mixture's experts each
  # axis of heads and features while sampling, as `tensor`, and of rows in the update: weights are spread over more
  # devices where each token reads them than where many rows share them
  decode: int = 1
  tensor: int = 1  # axis of heads and features; it communicates in every layer
  # (regular expression over a parameter's path, axes) that precede the usual ones; --mode=layout prints them
  rules: tuple[Setting, ...] = ()


@dataclasses.dataclass(frozen=True)
class ProcessesConfig(Section):
  """A run on several processes."""

  # without a sign of life, after which a process counts as dead and the run ends
  silent_s: float = 60.0
  same_every: int = 10  # steps between two comparisons of the processes' host state; 0 = never
