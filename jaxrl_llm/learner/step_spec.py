"""StepSpec: all settings that are fixed when the step is compiled, and its variants for other passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.inner_steps import LastTurnFirst, SlowFast
from jaxrl_llm.learner.lora import LoraSettings
from jaxrl_llm.learner.optimizer import Schedule
from jaxrl_llm.learner.packing import PackingSpec, aligned
from jaxrl_llm.objective.activation_noise import Layers
from jaxrl_llm.objective.divergence import Divergence
from jaxrl_llm.objective.entropy_bonus import EntropyBonus
from jaxrl_llm.objective.method_spec import Method
from jaxrl_llm.objective.reference import Refresh
from jaxrl_llm.objective.score_centering import ScoreCentering
from jaxrl_llm.rollout.decode_records import DecodeSettings, TokenRecords
from jaxrl_llm.rollout.draft_head import DraftHead
from jaxrl_llm.rollout.length_head import LengthHead
from jaxrl_llm.rollout.ngram_drafts import NgramSettings
from jaxrl_llm.rollout.pruning import PruningSettings
from jaxrl_llm.rollout.sampling import NO_FILTER, TokenFilter
from jaxrl_llm.rollout.tree_rules import TreeRules
from jaxrl_llm.types import ModelConfig


class ModelSpec(NamedTuple):
  """The models of a step and the number types that they compute in."""

  config: ModelConfig  # of the policy
  lora: LoraSettings | None  # None: the weights themselves are trained
  teacher: ModelConfig | None  # None: no distillation
  dtype: str  # of matrix products, in the update and while sampling
  weights_dtype: str  # of kernels while sampling
  head_chunk_tokens: int  # rows of logits that exist at once on a device


class DraftSpec(NamedTuple):
  """Draft tokens, and the rule that accepts them."""

  verify: (
    Callable[..., tuple[jax.Array, jax.Array]] | None
  )  # accepts tokens of earlier completions; None: no such drafts
  records_noise: bool  # rollouts record the step whose noise drew each token, which `coupled` reads
  ngram: NgramSettings | None  # drafts from the group's own completions
  head: DraftHead | None = None  # drafts by a head that the update trains


class RolloutSpec(NamedTuple):
  """How completions are sampled."""

  decode: DecodeSettings
  drafts: DraftSpec
  pruning: PruningSettings | None  # None: every rollout that begins is finished
  features: int  # F, of the correctness head or the length head; 0 without either
  tree: TreeRules | None  # when rollouts fork; None: they are independent
  carried_calls: int  # calls whose unfinished rows keep their cache; 0: such rows are encoded again
  lockstep: bool  # all shards of rows run equally many decode iterations
  multi_turn: bool  # rollouts hold turns and the observations between them
  continues: bool  # rollouts may be left unfinished, and are continued in a later step
  exit_memory: bool  # rollouts record the memory of the early-exit rule for that later step
  greedy_first: bool = False  # the first row of each prompt is greedy: evaluation, and baselines
  length_head: LengthHead | None = None  # None: expected lengths come from the host


class UpdateSpec(NamedTuple):
  """How the update is computed."""

  optimizer: optax.GradientTransformation
  schedule: Schedule  # optimizer step → learning rate
  inner_steps: SlowFast | LastTurnFirst | None  # None: one step a minibatch
  activation_noise: Layers | None  # in the forward pass
  minibatches: int  # per batch
  passes: int  # over the batch
  packing: PackingSpec  # of a microbatch
  remat: bool  # recompute layer activations in the backward pass
  attention: Callable[..., jax.Array] | None  # a kernel; None: XLA's attention
  quantize: bool  # kernels are rounded as while sampling
  skips_empty: bool  # batches may be empty, and an empty batch skips the update


class RowTokens(NamedTuple):
  """The most tokens of a row."""

  prompt: int
  completion: int


class ObjectiveSpec(NamedTuple):
  """The loss, and what belongs to it besides."""

  method: Method
  auxiliary_optimizer: optax.GradientTransformation | None  # None: no auxiliary model
  average_decay: float | None  # of the weights averaged for the old policy; None: no average
  entropy_bonus: EntropyBonus | None = None  # None: no bonus
  refresh: Refresh | None = None  # when the reference model follows the policy; None: never
  divergence: Divergence | None = None  # from a teacher, a term of the loss; None: no such term
  score_centering: ScoreCentering | None = None  # by the sampler's likeliest tokens; None: no term
  solution_tokens: int = 0  # of a prompt with a solution, which a teacher reads; 0: there is none
  teacher_tokens: RowTokens | None = (
    None  # of a teacher with another tokenizer; None: it has the policy's
  )


class LayoutSpec(NamedTuple):
  """Devices, sharding, and the sizes of a batch."""

  mesh: jax.sharding.Mesh
  rules: (
    sharding.Rules
  )  # (regular expression over a parameter's path, mesh axes), the first match counts
  prompts: int  # P, sampled in a step
  prompt_tokens: int  # L
  group: int  # rows of a slot in the update: sampled and replayed
  slots_per_prompt: int  # at most; rows of all slots of a prompt form one group
  contexts: (
    bool  # prompts record which strategy or hint they include, or what they were rewritten from
  )
  hints: bool  # prompts record the share of a known answer that they include
  slices: int = 1  # of devices that only a slow network connects; they divide the first mesh axis
  prefix_tokens: int = 0  # with which all prompts begin alike; sampling encodes them once
  replayed: int = 0  # slots of a batch for groups of earlier steps, behind those of its prompts
  imitates: bool = False  # rows of these groups form a term of the loss of their own
  unrecorded: bool = (
    False  # rows without log-probs, of other runs or steps, are in slots of the size of others
  )

  @property
  def slots(self) -> int:
    """Slots of a batch: sampled and replayed groups."""
    return self.prompts + self.replayed


class StepSpec(NamedTuple):
  """All settings that are fixed when the step is compiled."""

  model: ModelSpec
  rollout: RolloutSpec
  update: UpdateSpec
  objective: ObjectiveSpec
  layout: LayoutSpec
  seed: int


def full_bins(spec: StepSpec) -> int:
  """Bins of a minibatch on each shard of rows, at most, where all rows are learned and have all their tokens."""
  layout, size = spec.layout, spec.update.packing
  prompts = layout.slots // spec.update.minibatches
  prompts //= sharding.rows_shards(layout.mesh, sharding.UPDATE_ROWS)
  prompt, read = (
    aligned(size.align, tokens)
    for tokens in (layout.prompt_tokens, spec.rollout.decode.max_tokens - 1)
  )
  whole = prompt + layout.group * read
  fit = rows_of_bin(spec, spec.rollout.decode.max_tokens)
  if size.shares_prompt and fit >= layout.group:
    most = min(size.rows, size.predicted // spec.rollout.decode.max_tokens)
    return -(-prompts // min(size.tokens // whole, most // layout.group))
  return prompts * -(-layout.group // fit)


def rows_of_bin(spec: StepSpec, tokens: float) -> int:
  """Rows of one prompt that a bin holds, if every completion has `tokens`; at least one, at most the group."""
  layout, size = spec.layout, spec.update.packing
  L, encoded = layout.prompt_tokens, max(tokens - 1, 1)
  L, encoded = (aligned(size.align, n) for n in (L, encoded))
  fit = (size.tokens - L) / encoded if size.shares_prompt else size.tokens / (L + encoded)
  return int(max(1, min(fit, size.rows, size.predicted / tokens, layout.group)))


def prompt_copies(spec: StepSpec, tokens: float) -> int:
  """Times that a pass of the update encodes a prompt, if every completion has `tokens`.

  Rows in one bin share a copy of their prompt; for a kernel that cannot, each row has its own.
  """
  group = spec.layout.group
  return -(-group // rows_of_bin(spec, tokens)) if spec.update.packing.shares_prompt else group


def teacher_spec(spec: StepSpec) -> StepSpec:
  """The teacher's forward pass: its own shape, and kernels that are not rounded."""
  if spec.model.teacher is None:
    raise ValueError('the method has no teacher')
  spec = spec._replace(
    model=spec.model._replace(config=spec.model.teacher),
    update=spec.update._replace(quantize=False),
  )
  sizes = spec.objective.teacher_tokens
  return spec if sizes is None else _with_room(spec, sizes)


def solution_spec(spec: StepSpec) -> StepSpec:
  """The reference model's pass over prompts with a solution: bins have room for the longest of them."""
  sizes = RowTokens(spec.objective.solution_tokens, spec.rollout.decode.max_tokens)
  return _with_room(spec, sizes)


def _with_room(spec: StepSpec, sizes: RowTokens) -> StepSpec:
  """Bins with room for other rows than the policy's, as far as these are longer."""
  size, own = spec.update.packing, (spec.layout.prompt_tokens, spec.rollout.decode.max_tokens)
  # The last token of a completion predicts nothing.
  need, have = (
    (aligned(size.align, prompt), aligned(size.align, completion - 1))
    for prompt, completion in (sizes, own)
  )
  more = sum(max(n - h, 0) for n, h in zip(need, have, strict=True))
  predicted = max(size.predicted, sizes.completion)
  size = size._replace(tokens=size.tokens + more, predicted=predicted)
  return spec._replace(update=spec.update._replace(packing=size))


def demonstration_spec(spec: StepSpec) -> StepSpec:
  """Passes over demonstrations, one row a prompt."""
  return spec._replace(layout=spec.layout._replace(group=1))


def trained_weights_spec(spec: StepSpec) -> StepSpec:
  """Sampling from weights as they are saved, which are not rounded."""
  return spec._replace(model=spec.model._replace(weights_dtype=spec.model.dtype))


def evaluation_spec(
  spec: StepSpec, samples: int, temperature: float, token_filter: TokenFilter = NO_FILTER
) -> StepSpec:
  """Sampling of complete rows from weights as they are saved: of each prompt a greedy one, then `samples` others.

  There is no pruning, no length head, no draft head, no tree and no stop rule. An early-exit rule is kept where it ends
  turns of an environment.
  """
  spec = trained_weights_spec(spec)
  decode = spec.rollout.decode._replace(
    rollouts=1 + samples,
    temperature=temperature if samples else 0.0,
    token_filter=token_filter,
    slots=0,
    stop_rule=None,
    exit_rule=spec.rollout.decode.exit_rule if spec.rollout.multi_turn else None,
    records=TokenRecords(),
  )
  return spec._replace(
    rollout=spec.rollout._replace(
      decode=decode,
      pruning=None,
      length_head=None,
      drafts=spec.rollout.drafts._replace(head=None),
      tree=None,
      exit_memory=False,
      greedy_first=samples > 0,
    )
  )
