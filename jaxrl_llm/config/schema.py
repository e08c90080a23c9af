"""Every field of the configuration, with its type, its default and its meaning: one frozen dataclass a section."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_collections

from jaxrl_llm.config.data_sections import ColumnsConfig as ColumnsConfig
from jaxrl_llm.config.data_sections import DataConfig, EnvironmentConfig, RewardsConfig
from jaxrl_llm.config.data_sections import FailedConfig as FailedConfig
from jaxrl_llm.config.run_sections import AlarmsConfig as AlarmsConfig
from jaxrl_llm.config.run_sections import (
  CheckpointConfig,
  EvaluationConfig,
  MeshConfig,
  MonitoringConfig,
  ProcessesConfig,
)
from jaxrl_llm.config.run_sections import ProfileConfig as ProfileConfig
from jaxrl_llm.config.run_sections import PrometheusConfig as PrometheusConfig
from jaxrl_llm.config.run_sections import SamplingConfig as SamplingConfig
from jaxrl_llm.config.section import Section, Stage, stage
from jaxrl_llm.types import JsonValue, Settings


@dataclasses.dataclass(frozen=True)
class ScratchConfig(Section):
  """config.model='scratch': a character-level decoder with random weights."""

  width: int = 128  # features of the residual stream
  layers: int = 5
  heads: int = 4  # query heads
  kv_heads: int = 4  # key-value heads; a divisor of heads
  mlp: int = 512  # features inside a feed-forward layer
  max_tokens: int = 128  # longest prompt and completion together
  experts: int = 0  # of a mixture; 0 = a dense feed-forward layer
  experts_per_token: int = 2


@dataclasses.dataclass(frozen=True)
class LearnerConfig(Section):
  """How the update is computed."""

  minibatches: int = 1  # optimizer steps per pass over a batch; 1 = strictly on-policy
  # times that a batch is learned; after the first, prompts are shuffled into other minibatches
  passes: int = 1
  # tokens of one gradient-accumulation pass on a device; 0 = automatic: 256 on a CPU, else 8192
  microbatch_tokens: int = 0
  # recompute layer activations in the backward pass: True, False, or auto = not on CPU
  remat: bool | str = 'auto'
  # xla, or kernels that write no scores to memory: splash on TPUs, which computes no masked ones, and cudnn on NVIDIA
  # GPUs; auto = splash for completions of 2,048 tokens or more, cudnn for rows of 256 or more, where they go with the
  # model and the mesh
  attention: str = 'auto'
  # of log-probs in sampling and update: exact = no bit differs, in bfloat16 on CPUs; off
  agreement: str = 'off'
  quantize: bool = False  # the forward pass reads kernels rounded as in rollout.weights_dtype
  # tokens of a mixture go to the experts that were chosen while sampling (R3)
  replay_experts: bool = False


@dataclasses.dataclass(frozen=True)
class NgramConfig(Section):
  """Draft tokens looked up in the group's own completions; they save decode iterations and change no token."""

  match: int = 3  # longest context to look up, in tokens
  draft: int = 0  # tokens drafted per decode iteration; 0 = off


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Section):
  """How completions are sampled."""

  # rows decoded at once; 0 = all for which there is memory. A finished row hands its slot to the next in the queue
  slots: int = 0
  queue_order: Stage = stage('fifo')  # order of the rows that wait for a slot
  length_schedule: Stage = stage('constant')  # tokens that a completion may have, by step
  stop: Stage = stage('none')  # when the update begins although rows still run
  # a prompt's earlier completions as drafts: lenient(lenience), or coupled, which is exact but samples earlier
  # completions again as long as the policy agrees, so that prompts with a settled answer are explored less
  draft: Stage = stage('none')
  draft_memory_mb: int = 1024  # of those drafts on the host; least recent prompts are dropped first
  early_exit: Stage = stage('none')  # ends a row early: repetition, entropy, marker
  pruning: Stage = stage('none')  # begins more rollouts than are learned from: quality, uniform
  # learns how long the rollouts of a prompt are; longest_first reads it in place of earlier visits: discounted_return
  length_head: Stage = stage('none')
  cache_dtype: str = 'auto'  # of keys and values: float32, bfloat16, int8; auto = that of compute
  # of the kernels while sampling: float32, bfloat16, int8, float8_e4m3fn; auto = that of compute
  weights_dtype: str = 'auto'
  # xla, or ragged: a kernel that reads of the cache each row's own tokens; auto = ragged on GPUs for completions of 256
  # tokens or more, and on TPUs for 2,048 or more of models whose heads fill a TPU's tiles
  attention: str = 'auto'
  # widths of the cache, each twice the one before, so that attention costs by the longest row so far
  windows: int = 1
  test_every: int = 1  # decode iterations between two tests of whether the loop may end
  ngram: NgramConfig = NgramConfig()
  # drafts tokens from the policy's hidden states, and learns from the rollouts; they change no token: eagle
  draft_head: Stage = stage('none')
  tree: Stage = stage('none')  # rollouts of a group branch: latr, echo, branch_grpo
  # all devices run equally many decode iterations; False: each ends by itself
  lockstep: bool = True
  max_age: int = 4  # steps over which an unfinished rollout may be continued
  # keep the keys and values of unfinished rollouts, instead of encoding them again
  carry_cache: bool = False


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig(Section):
  """What the update minimizes: the stages of a policy-gradient loss."""

  advantage: Stage = stage('group_normalized', eps=1e-6)
  # how a row's advantage is spread over its tokens: gae, process, steps, gigpo, turn_grouped, turn_whitened,
  # turn_reward_whitened
  credit_assignment: Stage = stage('row')
  # a second model for credit assignment, which starts as a copy of the policy: critic, outcome, preference
  auxiliary_model: Stage = stage('none')
  # weights for a sampler that differs from the old policy; recomputes log-probs
  importance_correction: Stage = stage('none')
  # denominator of the ratio: recorded, before, average(decay), interpolated
  old_policy: Stage = stage('auto')
  ratio: Stage = stage('token')
  # scales advantages by the policy's uncertainty: unsure
  advantage_modulation: Stage = stage('none')
  trust_region: Stage = stage('clip', low=0.2, high=0.2)
  token_weighting: Stage = stage('none')  # weights of tokens; 0 = masked out
  kl: Stage = stage('none')  # KL penalty toward the reference model: k1, k2, k3
  # a copy of the first weights: frozen, refreshed(every, mixup) from the policy, or reincarnated(after) from it once
  reference: Stage = stage('frozen')
  aggregation: Stage = stage('sequence_mean')
  # denominator of the KL term; auto: that of its paper, else that of the policy term
  kl_aggregation: Stage = stage('auto')
  kl_scale: Stage = stage('none')  # factor on the KL term of a prompt: by_difficulty
  entropy_bonus: Stage = stage('none')  # entropy in the loss: fixed(coef), adaptive(target)
  lr_scale: Stage = stage('none')  # learning rate by batch: effective_sample_size
  # loss of demonstrations beside or instead of rollouts: chord, replace, likelihood, one_token_rollouts,
  # suffix_weighted
  sft_loss: Stage = stage('none')
  # a teacher's log-probs instead of rewards: on_policy, for one with another tokenizer
  # on_policy_spans(teacher_prompt_tokens, teacher_completion_tokens), or with the reference model as a teacher that
  # reads a solution in the prompt: solved_by_group(prompt_tokens), solved_by_data(prompt_tokens)
  distillation: Stage = stage('none')
  # distance from a teacher over the vocabulary, a term of the loss beside reward_weight · rewards: forward_kl,
  # reverse_kl, jensen_shannon(beta); with top_k over its likeliest tokens and a bucket of the others
  divergence: Stage = stage('none')
  # subtracts the mean score under the sampler: top_k(tokens) by its likeliest tokens
  score_centering: Stage = stage('none')
  # a model, named as config.model is, with the same vocabulary except for on_policy_spans; '' = none
  teacher: str = ''
  # KL penalty toward the reference model, subtracted from rewards: k1, k2, k3, absolute
  reward_kl: Stage = stage('none')
  # changes rewards by length or success rate, before advantages
  reward_shaping: Stage = stage('none')
  # keep | mask: whether zero-variance groups (before reward_shaping) count in the denominator
  zero_variance: Stage = stage('keep')
  # noise in the forward pass of the update: layerwise(sigma, learning_rate)
  activation_noise: Stage = stage('none')
  weigh_rows: bool = True  # rows kept at random count 1 / their probability
  head_chunk_tokens: int = 512  # rows of logits that exist at once on a device


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section):
  """The optimizer and its schedule."""

  # adamw, adafactor, lion, muon (of the matrices in layers, adamw of the others), or your 'package.module:function',
  # called with the schedule and those of weight_decay, b1, b2, eps and moments_dtype that it names
  fn: str = 'adamw'
  learning_rate: float = 1e-5
  warmup_steps: int = 0  # optimizer steps of linear warm-up
  decay: str = 'constant'  # constant | cosine | linear, over the optimizer steps after warm-up
  weight_decay: float = 0.0  # of matrices
  b1: float = 0.9  # of adamw, as b2 and eps; the others have optax's own
  b2: float = 0.95
  eps: float = 1e-8
  # of adamw: float32, or bfloat16 for half the memory; then rounded stochastically, by seed and step
  moments_dtype: str = 'float32'
  clip_norm: float = 1.0  # largest global norm of the gradient
  max_skipped: int = 5  # the run stops after so many non-finite gradients in a row
  # an outer loop of steps: slow_fast (several steps, interpolation, one more), last_turn_first (one step a turn)
  outer: Stage = stage('none')


@dataclasses.dataclass(frozen=True)
class LoraConfig(Section):
  """A low-rank adapter that is trained in place of the weights."""

  # r: a matrix W becomes W + alpha / r · A·B, A [in, r] and B [r, out]; 0 = no adapter
  rank: int = 0
  alpha: float = 16.0
  # regular expression over the names of a layer's matrices
  targets: str = '(q|k|v|o|gate|up|down)$'
  init: str = ''  # a folder in PEFT's format to start from; '' = A at random and B = 0
  # of the frozen kernels in layers: auto = that of compute, int8 or nf4 (4 bits) with a scale per 64 inputs (QLoRA)
  base_dtype: str = 'auto'


@dataclasses.dataclass(frozen=True)
class CurriculumConfig(Section):
  """Which prompts are sampled, and how many slots each takes."""

  # prompts considered in a step: everything, at most `limit` at random (subset), a window of a shuffled stream
  # (stream), or those that the last step encoded for prior_pooling.hidden_state (encoded)
  candidates: Stage = stage('subset', limit=65536)
  evidence_decay: Stage = stage('visit', decay=0.25)  # none, visit, step, two_scale, reset
  # shared evidence: none, kind, fitted_kind, anchors (rates of other models), kernel, regression (features),
  # hidden_state (the policy's hidden state of each prompt; with answer_tokens also the odds of its known answer)
  prior_pooling: Stage = stage('kind', strength=2.0)
  kind_decay: float = 0.9  # of a kind's evidence, per visit to one of its prompts
  # of the success rate; or a draw from its posterior: thompson
  rate_estimate: Stage = stage('mean')
  # score of a prompt: a function of curriculum/utility.py, such as uniform, mopps, bots
  utility: Stage = stage('mixed_group')
  selection: Stage = stage('softmax', temperature=0.2)  # top, softmax, skip
  # which prompts are left out, and the share of slots that checks posteriors: none, audit, retire, streaks
  eligibility: Stage = stage('audit', share=0.05)
  slots_per_prompt: int = 1  # average number of slots, of config.rollouts each, that a prompt takes
  allocation: Stage = stage('equal')  # slots among the prompts of a step: neyman, xrpo, marginal
  domain_mix: Stage = stage('none')  # shares of the slots by source: mix(targets)
  # labels that the majority of a group contradicts: majority_refined replaces them and lists suspects
  labels: Stage = stage('none')
  # hints from a known answer: prefix, item_response, by_difficulty, stages (in the completion); guide, exemplars,
  # contexts, self_rolled (in the prompt; the last with replay.reuse=cached); what the policy writes: rewritten
  # (questions, from hard and medium ones), written (hints), reflected (on a failed attempt, for a retry); corrected: a
  # wrong rollout is completed anew from its first wrong step
  hint: Stage = stage('none')
  # count | ignore: truncated wrong rollouts count as wrong, or not at all
  truncated: str = 'count'


@dataclasses.dataclass(frozen=True)
class ReplayConfig(Section):
  """Rollouts kept for later steps."""

  # which groups are learned from: mixed (dynamic sampling), dars (more rollouts of hard prompts)
  collect: Stage = stage('none')
  # successes(count): right rollouts of earlier visits beside new ones; cached: one of them in place of a row of an
  # all-wrong group; mixed_groups(share): groups of recent steps in slots of their own, beside those of the sampled
  # prompts; self_imitation(share, weight): good rollouts of recent steps, in a loss term of their own;
  # recomposed(kept): short right and long wrong rollouts, and the others later; contrast_pairs(share, draws): pairs of
  # a group's best and worst rollouts, resampled by their difference; extremes(best, worst): the best and the worst
  # rollouts of each slot alone; shared(folder, share): groups of other runs that write to the same folder, tokenized
  # and graded anew
  reuse: Stage = stage('none')


@dataclasses.dataclass(frozen=True)
class SftConfig(Section):
  """A supervised start on demonstrations: a row's `solution` or `response`, else its answer."""

  steps: int = 0
  learning_rate: float = 3e-3
  prompts: int = 64  # demonstrations of a step
  # of the training set, the demonstrations; data.keep does not count here: in_range(column, above, at_most)
  keep: Stage = stage('none')


@dataclasses.dataclass(frozen=True)
class RewardModelConfig(Section):
  """--mode=reward_model: the loss on pairs of completions."""

  # of (r_chosen + r_rejected)² in the loss, which keeps rewards near 0, as in TRL
  center_rewards_coefficient: float = 0.0


@dataclasses.dataclass(frozen=True)
class Config(Section):
  """The configuration of a run."""

  model: str = 'smollm2-135m'  # that name, a folder, a .gguf file, a wheel, or a hub name
  scratch: ScratchConfig = ScratchConfig()
  dtype: str = 'auto'  # of compute; auto = bfloat16 on TPU and GPU, float32 on CPU
  seed: int = 0
  # fused: one program; lag: grades during the next steps; split: two programs, quick to compile
  mode: str = 'fused'
  # with mode='lag': how many updates late a batch is learned; so many are graded at once
  lag_steps: int = 1
  steps: int = 60  # 0 = only the supervised start
  # P: prompts per step; 0 = 4 on a CPU, 64 on accelerators, rounded up to the number of row shards
  prompts: int = 0
  rollouts: int = 8  # G: rollouts per prompt
  prompt_tokens: int = 64  # L: longer prompts are dropped, and counted
  completion_tokens: int = 16  # T: longest completion
  temperature: float = 1.0
  learner: LearnerConfig = LearnerConfig()
  rollout: RolloutConfig = RolloutConfig()
  objective: ObjectiveConfig = ObjectiveConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  lora: LoraConfig = LoraConfig()
  curriculum: CurriculumConfig = CurriculumConfig()
  data: DataConfig = DataConfig()
  rewards: RewardsConfig = RewardsConfig()
  environment: EnvironmentConfig = EnvironmentConfig()
  replay: ReplayConfig = ReplayConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  monitoring: MonitoringConfig = MonitoringConfig()
  mesh: MeshConfig = MeshConfig()
  processes: ProcessesConfig = ProcessesConfig()
  sft: SftConfig = SftConfig()
  reward_model: RewardModelConfig = RewardModelConfig()

  @property
  def longest_prompt_tokens(self) -> int:
    """Tokens of the longest prompt that a model reads: a teacher's, with a solution in it, may be longer."""
    return max(self.prompt_tokens, self.objective.distillation.get('prompt_tokens', 0))


# The fields beside `fn` that belong to no function: choosing another function keeps them.
FIXED_FIELDS = {
  f'config.{name}': tuple(
    field.name for field in dataclasses.fields(section) if field.name not in ('fn', 'settings')
  )
  for name, section in (('rewards', RewardsConfig), ('environment', EnvironmentConfig))
}


def is_stage(section: Settings | ml_collections.ConfigDict, field: str) -> bool:
  """Whether the fields of a section beside `fn` are settings of that function; `field` is its name."""
  return 'fn' in section and field != 'config.optimizer'


def default() -> ml_collections.ConfigDict:
  """The defaults as a ConfigDict, over which files and overrides are laid."""
  return ml_collections.ConfigDict(Config().to_dict())


def typed(config: Config | ml_collections.ConfigDict) -> Config:
  """The dataclasses of a ConfigDict, with the defaults of missing fields; a Config is returned as it is."""
  return config if isinstance(config, Config) else _fill(Config(), config.to_dict())


def mutable(config: Config | ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """A copy as a ConfigDict, whose fields can be set."""
  return ml_collections.ConfigDict(config.to_dict())


def replace(config: Config, changes: Settings) -> Config:
  """A copy with other values: replace(config, {'steps': 10, 'replay.reuse': stage('none')})."""
  for field, value in changes.items():
    config = _replaced(config, field.split('.'), value)
  return config


def _replaced(section: Any, names: list[str], value: JsonValue) -> Any:
  name, *rest = names
  inner = _replaced(getattr(section, name), rest, value) if rest else value
  return dataclasses.replace(section, **{name: inner})


def _fill(reference: Section, values: Settings) -> Any:
  """A section of the type of `reference`, whose values stand in for missing ones."""
  fields = {f.name: getattr(reference, f.name) for f in dataclasses.fields(reference)}
  filled = {
    name: _fill(old, values.get(name, old)) if isinstance(old, Section) else values.get(name, old)
    for name, old in fields.items()
    if name != 'settings'
  }
  if 'settings' in fields:
    filled['settings'] = {name: values[name] for name in values if name not in filled}
  return type(reference)(**filled)
