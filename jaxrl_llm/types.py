"""Records that cross package borders, and the glossary of shape suffixes.

P prompts of a step, G rollouts per prompt, B = P * G rows (row b belongs to prompt b // G), L prompt tokens,
T completion tokens, V vocabulary, D width, F features, H attention heads, K key-value heads, Q query positions.
Prompts are right-padded: token i of prompt p is real where i < length_P[p]. Completions likewise. The position
decides what is padding, never the token id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

# Grading workers import this module without jax, which would take memory and a device.
if TYPE_CHECKING:
  import jax

  Metrics: TypeAlias = dict[str, jax.Array]
else:
  Metrics = dict[str, Any]

# jax's in the compiled program and numpy's on the host, which have no common type.
Array: TypeAlias = Any
# A decoded JSON value, or a setting of a config file.
JsonValue: TypeAlias = (
  'None | bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue]'
)
Settings: TypeAlias = Mapping[str, Any]  # of a named function: JSON values by name
JsonObject: TypeAlias = dict[str, Any]  # decoded JSON, or what becomes JSON
Params: TypeAlias = Any  # a tree of arrays: weights, an adapter, or their gradient

# Why a row stopped: values of Rollout.reason_B.
UNFINISHED, STOPPED, TRUNCATED, EXITED, ABORTED = 0, 1, 2, 3, 4
REASONS = ('unfinished', 'stop', 'length', 'exit', 'abort')

# What a prompt holds: values of Prompts.context_P, from 0 up the number of a strategy, stage or hint. PLAIN: the
# question itself; FROM_HARD, FROM_MEDIUM: a question rewritten from a hard or medium one; REQUEST: a request to rewrite
# it, to reflect on an attempt, or for hints; RETRY: the question with such a reflection.
PLAIN, FROM_HARD, FROM_MEDIUM, REQUEST, RETRY = -1, -2, -3, -4, -5


# Key of Row.extra: the columns of the source, where they differ from Row's other fields.
COLUMNS = '<columns>'


class UserError(ValueError):
  """Bad input, as one sentence that names the field, the value and the remedy.

  The message is one line: line ends become spaces, and unprintable characters are escaped as \\x1b.
  """

  def __init__(self, sentence: str):
    line = ' '.join(part.strip() for part in str(sentence).splitlines())
    super().__init__(''.join(c if c.isprintable() else repr(c)[1:-1] for c in line))


class Row(NamedTuple):
  """One row of data: a question or messages, and the inputs of its reward function."""

  id: str  # stable: a hash of source, prompt and answer
  question: str  # '' where the prompt is messages
  # dicts of role and content; () where the prompt is a question
  messages: tuple[dict[str, str], ...]
  answer: str  # '' where the source's own verifier needs none (some reasoning-gym tasks)
  source: str  # names the data in metrics: val-core/<source>/...
  extra: JsonObject  # all other inputs of the reward function


class Prompts(NamedTuple):
  """The prompts of one step."""

  tokens_PxL: Array  # int32, right-padded
  length_P: Array  # int32, in tokens
  index_P: Array  # int32, the row in the data set: keys the noise and the posterior
  born_P: Array  # int32, the step that proposed it: keys the noise of its rollouts, continued ones included
  expected_P: Array  # float32, expected tokens of a rollout; 0 = unknown
  # int32, number of the slot among those that the prompt fills in this step; None: each fills one
  part_P: Array | None = None
  # float32, weight of its rows, for prompts with more or fewer rows by design; None: all 1
  weight_P: Array | None = None
  # int32, the strategy or hint in its question, or another value of `PLAIN`; None: no strategies, and none is rewritten
  context_P: Array | None = None
  # float32, the share of a known answer that it contains; None: no hints
  hint_P: Array | None = None


class Turns(NamedTuple):
  """The turns of rows with an environment: sampled tokens, and observations between them."""

  # int32, the turn of its row in which a token was sampled, from 0 up; −1 for environment tokens
  number_BxT: Array
  reward_BxT: Array  # float32, the environment's reward of a turn, at its last token; 0 elsewhere
  state_BxT: Array  # int32, identifies the observations before the turn, at the turn's tokens
  outcome_B: Array  # int8, one of rewards.OUTCOMES: whether the environment failed


class Rollout(NamedTuple):
  """G completions of each prompt: the result of `generate`, or rows that it continues."""

  tokens_BxT: Array  # int32, right-padded
  logp_BxT: Array  # float32, behavior log-probs: of the distribution that was sampled from
  length_B: Array  # int32, in tokens, the end token included
  reason_B: Array  # int8, an index of REASONS
  version_BxT: Array  # int32, optimizer steps taken by the weights that sampled the token
  # float32, 1 / the probability that the row was kept, times its share of a resampled batch; 1 without both
  weight_B: Array
  # float32, the hidden state that the correctness head or the length head reads; F = 0 without either
  feature_BxF: Array
  # None: all tokens were sampled, in one turn. Environment tokens are masked out of the loss
  turns: Turns | None = None
  # uint8 or uint16 [B, T, N, k]: the experts in N layers that a token was routed to when the next one was sampled.
  # Undefined for the last token of a row. None: not recorded
  expert_BxTxNxk: Array | None = None
  # float32 [B, M]: the early-exit rule's memory, for the call that continues the row; None: no rule
  memory_BxM: Array | None = None
  # int32, the step whose noise drew a token: before born_P where a draft was accepted. None: not recorded
  noise_BxT: Array | None = None
  # int32, the likeliest tokens of the distribution that a token was sampled from, by falling probability, and float32,
  # their log-probs over the whole vocabulary. None: not recorded
  top_id_BxTxK: Array | None = None
  top_logp_BxTxK: Array | None = None


class Solutions(NamedTuple):
  """Each completion's prompt with a known solution in it, which a teacher reads instead of the plain prompt."""

  tokens_BxL: Array  # int32, right-padded
  length_B: Array  # int32, in tokens; 0 where no solution is known


class TeacherTokens(NamedTuple):
  """Each completion behind its prompt in the tokens of a teacher with another tokenizer, L and E at most.

  A span is a shortest piece of text that is whole tokens of both; they are numbered from 0 in each completion. The
  completion ends with its last span.
  """

  prompt_BxL: Array  # int32, right-padded; the same for all rows of a prompt
  prompt_length_B: Array  # int32
  tokens_BxE: Array  # int32, right-padded
  length_B: Array  # int32; 0 without a span
  span_BxE: Array  # int32, the span of the teacher's token; −1 for padding
  own_span_BxT: Array  # int32, of the policy's token; −1 where there is none


class Batch(NamedTuple):
  """The input of `update`. An empty batch has length_B = 0 everywhere.

  A group is mixed where the scores of its rows differ by more than 1e-6 (`rewards.outcomes.SAME`). The score is
  `reward_B`: that of config.rewards.fn plus the weighted config.rewards.parts and rewards of an environment, in units
  of the reward function; with config.rewards.vote the vote's 0 or 1. A method whose advantage reads each reward alone
  (GDPO) compares each of nonzero weight. Scores are final: of the truncated text and the replaced label, where
  config.rewards.truncate and config.curriculum.labels grade again, and `config.rewards.failed.value` where a failure
  scores. Length shaping (config.objective.reward_shaping), KL and hints change no score. Rows of length 0 do not count;
  the rows of all slots of a prompt form one group; replayed rows (config.replay.reuse) belong to it in the update, and
  are no evidence for the curriculum. Replayed groups (`mixed_groups`, `self_imitation`) fill slots of their own, behind
  the sampled ones.

  Success concerns the posterior: `success_B` is the score of config.rewards.fn without parts, scaled to [0, 1] by
  config.rewards.bounds, and `correct_B` whether it reaches config.rewards.right.
  """

  prompts: Prompts
  rollout: Rollout
  reward_B: Array  # float32
  correct_B: Array  # float32 in {0, 1}: the answer is right
  # One row a prompt, of length 0 where it has none; log-probs as recorded, all 0 in a row: unknown.
  demo: Rollout | None = None  # None: the method has no demonstrations
  # float32 in {0, 1}: rows of an earlier visit, without log-probs; None: no replayed rows
  replayed_B: Array | None = None
  # float32, the advantage of a row in the self-imitation term, above 0; 0 for rows that are none of it. None: no term
  imitation_B: Array | None = None
  # float32, the rewards that reward_B is the weighted sum of; None: the method reads the sum alone
  parts_BxK: Array | None = None
  # float32 in [0, 1], success by row; only on the host. None: correct_B
  success_B: Array | None = None
  solutions: Solutions | None = None  # None: the method has no teacher that reads them
  teacher_tokens: TeacherTokens | None = None  # None: no teacher with a tokenizer of its own

  @property
  def success(self) -> Array:
    """`success_B`, or `correct_B` where that is None."""
    return self.correct_B if self.success_B is None else self.success_B


class TrainState(NamedTuple):
  """Everything on the device that outlives a step."""

  params: Params  # float32, trained: the weights, or with LoRA the adapter
  opt_state: Params
  step: Array  # int32, optimizer steps taken
  skipped: Array  # int32, consecutive updates skipped for a non-finite gradient
  # int32, keys all noise; an argument of the program, so that other seeds need no new one
  seed: Array
  rollout_head: Params = None  # correctness head, length head or draft head, trained on rollouts
  # float32 weights at the start, for methods with a reference model; with LoRA `base` is the reference
  reference: Params = None
  carried: tuple = ()  # carried_kv.Carried of unfinished rows, oldest first; () = encoded again
  auxiliary_model: Params = None  # learner.auxiliary_model.State
  average: Params = None  # float32 weights averaged over steps, for the old policy
  inner_steps: Params = None  # state of the loop around optimizer steps
  activation_noise: Params = None  # log sigma of each layer and its optimizer state
  entropy_bonus: Params = None  # coefficient of an entropy bonus that follows the entropy
  teacher: Params = None  # float32, frozen; not saved in checkpoints
  base: Params = None  # with LoRA the frozen weights, matrices in the type of compute; not saved


class GlobalSizes(NamedTuple):
  """Fields of ModelConfig in layers that do not slide, where they differ from those of layers that do."""

  head_dim: int
  kv_heads: int
  key_values: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
  """The attention layers of a decoder. Defaults are Llama's."""

  heads: int  # query heads
  kv_heads: int
  head_dim: int
  qkv_bias: bool = False
  out_bias: bool = False
  # RMS norm of queries and keys: '' none, 'head' per head, 'all' over all heads, 'rotated' per head without a scale,
  # after the rotation and in rotated layers alone, 'qkv' as 'head' and of values without a scale
  qk_norm: str = ''
  query_scale: float = 0.0  # factor on q·k; 0 = 1 / √head_dim
  position_scale: float = 0.0  # b: queries at position p are multiplied by 1 + b·ln(1 + ⌊p / span⌋)
  position_span: int = 0
  unrotated_scale: bool = False  # that factor is for unrotated layers alone, and of p + 1
  sinks: bool = False  # per head a learned score without a value, which takes part in the softmax
  attention_cap: float = 0.0  # scores become cap·tanh(score / cap); 0 = no cap
  window: int = 0  # tokens that a sliding layer attends to, including the query
  # instead, it attends to the tokens of the query's chunk of `window` positions
  chunked: bool = False
  sliding: tuple[bool, ...] = ()  # per layer; () = no layer slides


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
  """Attention whose keys and values are expanded from one latent vector a token."""

  latent: int = 0  # features of that vector; 0 = keys and values are projections of the token
  # features of a latent vector of queries; 0 = they are projections of the token
  query_latent: int = 0
  value_dim: int = 0  # features of a head's values; without a latent they are head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
  """Recurrent layers, whose mixer is a gated delta rule, and a gate of the others. arXiv:2412.06464."""

  recurrent_layers: tuple[bool, ...] = ()  # per layer; () = all layers attend
  delta_key_heads: int = 0  # each serves consecutive value heads, equally many
  delta_value_heads: int = 0  # each has a state [delta_key_dim, delta_value_dim]
  delta_key_dim: int = 0
  delta_value_dim: int = 0
  delta_window: int = 0  # tokens that the convolution of queries, keys and values reads
  # results of attention are multiplied by σ(x·W), before the last projection
  output_gate: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
  """Rotary embeddings of a decoder. Defaults are Llama's."""

  rope_theta: float = 10000.0
  # Hugging Face's rope_scaling as sorted (name, value) pairs, so that the config stays hashable.
  rope_scaling: tuple[tuple[str, Any], ...] = ()
  sliding_rope_theta: float = 0.0  # of sliding layers, without scaling; 0 = that of other layers
  unrotated: tuple[bool, ...] = ()  # per layer: no rotary embedding; () = all layers have one
  # Features of a head that are rotated: the first ones, or with a latent the last ones; 0 = all
  rotary_dim: int = 0
  rotary_pairs: bool = False  # neighboring features are rotated together, not those of two halves


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
  """A mixture of experts in place of dense feed-forward layers."""

  experts: int = 0  # E; 0 = a dense MLP
  experts_per_token: int = 0
  weighted_inputs: bool = False  # weights multiply the inputs of experts, not their outputs
  norm_top_k: bool = False  # weights of the chosen experts are divided by their sum
  weight_scale: float = 1.0  # factor on these weights
  router_score: str = 'softmax'  # or sigmoid
  # a value per expert decides the choice with the score, and not the weight
  choice_bias: bool = False
  # the choice is among the experts of some groups: those whose best two score most
  expert_groups: int = 1
  chosen_groups: int = 1
  router_bias: bool = False
  expert_bias: bool = False
  # per layer: a dense MLP instead; () = all layers have experts
  dense_layers: tuple[bool, ...] = ()
  dense_mlp: int = 0  # features inside these MLPs
  shared_mlp: int = 0  # features inside an expert that all tokens use; 0 = none
  shared_gate: bool = False  # that expert is weighted by σ(x·w)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConfig:
  """The nonlinearity of feed-forward layers."""

  activation: str = 'silu'  # or gelu_tanh, or clamped_swiglu
  gate_gain: float = 0.0  # of clamped_swiglu: α in gate·σ(α·gate)
  gate_limit: float = 0.0  # of clamped_swiglu: gate ≤ limit and |up| ≤ limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
  """Parts of a layer that few families have."""

  key_values: bool = False  # values are the keys before their norm and rotation
  global_sizes: GlobalSizes | None = None  # None: all layers have equal sizes
  # The result of each layer is multiplied by a number, which is not trained; of models with norms after layers.
  layer_scales: bool = False
  # The router and the experts read the residual stream through norms of their own, and the outputs of the experts and
  # of the shared one are normed before they are added; the weight of an expert has a factor of its own.
  expert_norms: bool = False
  kv_readers: int = 0  # the last layers, which attend to keys and values of an earlier one
  kv_reader_mlp: int = 1  # factor on the features inside the MLPs of these layers
  layer_input: int = 0  # features of an input that each layer has besides x; 0 = none
  layer_input_vocab: int = 0  # tokens in the table of these inputs


class Structure(NamedTuple):
  """What decides the parameters of a layer."""

  is_recurrent: bool
  has_experts: bool
  is_global: bool  # its sizes are `global_sizes`
  source: int | None  # the layer whose keys and values it attends to; None: it has its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(
  AttentionConfig,
  LatentConfig,
  DeltaConfig,
  RotaryConfig,
  MixtureConfig,
  ActivationConfig,
  LayerConfig,
):
  """The shape of a decoder. Defaults are Llama's; other families set the fields in which they differ."""

  vocab: int
  width: int
  layers: int
  mlp: int  # features inside a feed-forward layer, or inside one expert
  max_tokens: int  # longest context that the model was trained for
  norm_eps: float = 1e-5
  mlp_bias: bool = False
  tied: bool = True  # the head is the transposed embedding
  family: str = 'llama'  # Hugging Face's model_type: decides names of tensors and nothing else
  norms: str = 'before'  # place of the RMS norms of attention and MLP: before, after, or both
  logit_cap: float = 0.0  # logits become cap·tanh(logit / cap); 0 = no cap
  embed_scale: float = 1.0  # factor on embeddings, not on a tied head
  residual_scale: float = 1.0  # factor on what attention and MLP add to the residual stream
  logit_scale: float = 1.0  # factor on logits
  is_exact: bool = False  # no bit of a token depends on other rows: `models/exact.py`

  @property
  def mixtures(self) -> int:
    """The number of layers with a mixture of experts."""
    return (self.layers - sum(self.dense_layers)) if self.experts else 0

  def mixture_place(self, layer: int) -> int | None:
    """The place of a layer among those with a mixture of experts; None for a dense one."""
    if not self.experts or (self.dense_layers and self.dense_layers[layer]):
      return None
    return layer - sum(self.dense_layers[:layer])

  @property
  def slides(self) -> tuple[bool, ...]:
    """Whether the window of each layer slides."""
    return self.sliding or (False,) * self.layers

  @property
  def is_recurrent(self) -> bool:
    """Whether some layer has a state in place of cached tokens."""
    return any(self.recurrent_layers)

  @property
  def has_equal_caches(self) -> bool:
    """Whether all layers cache arrays of equal sizes for a token."""
    return self.global_sizes is None and not self.is_recurrent and not self.kv_readers

  def source(self, layer: int) -> int | None:
    """The layer whose keys and values a reader attends to: the last of its kind that has some."""
    if layer < (own := self.layers - self.kv_readers):
      return None
    return max(i for i in range(own) if self.slides[i] == self.slides[layer])

  def of_layers(self, slides: bool) -> ModelConfig:
    """The config with the sizes of layers that slide, or of those that do not."""
    return self if slides or self.global_sizes is None else self._of_global_layers

  @property
  def _of_global_layers(self) -> ModelConfig:
    assert self.global_sizes is not None
    return dataclasses.replace(self, global_sizes=None, **self.global_sizes._asdict())

  @property
  def structures(self) -> tuple[Structure, ...]:
    """Of each layer; equal layers have equal parameters."""
    return tuple(map(self._structure, range(self.layers)))

  def _structure(self, layer: int) -> Structure:
    is_recurrent = self.is_recurrent and self.recurrent_layers[layer]
    is_global = self.global_sizes is not None and not self.slides[layer]
    has_experts = self.mixture_place(layer) is not None
    return Structure(is_recurrent, has_experts, is_global, self.source(layer))


class Model(NamedTuple):
  """A model ready for use, as `models.load` returns it."""

  config: ModelConfig
  params: Params
  tokenizer: Any  # models.tokenizer.Tokenizer
  name: str
