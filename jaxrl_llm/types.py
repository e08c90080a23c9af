"""The records that cross the borders of the program, and the glossary of shape suffixes.

P prompts of a step, G rollouts per prompt, B = P * G rows (row b belongs to prompt b // G), L prompt tokens,
T completion tokens, V vocabulary, D width, F features, H attention heads, K key-value heads, Q query positions.
Prompts are right-padded: token i of prompt p is real where i < length_P[p]. Completions likewise. Padding is
decided by position and never by a token id.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

# Grading workers import this module and must not pay for jax, nor touch a device.
if TYPE_CHECKING:
  import jax

  Array = jax.Array | np.ndarray
else:
  Array = Any

# Why a row stopped, as stored in Rollout.reason_B.
UNFINISHED, STOPPED, TRUNCATED, EXITED, ABORTED = 0, 1, 2, 3, 4
REASONS = ('unfinished', 'stop', 'length', 'exit', 'abort')


# The field of Row.extra with the columns that Row's other fields were made of, where these do not say the same.
COLUMNS = '<columns>'


class UserError(ValueError):
  """Bad input, told in one sentence that names the field, the value and the remedy.

  One line, whatever the value is: line ends become spaces, and what does not print is shown as \\x1b.
  """

  def __init__(self, sentence: str):
    line = ' '.join(part.strip() for part in str(sentence).splitlines())
    super().__init__(''.join(c if c.isprintable() else repr(c)[1:-1] for c in line))


class Row(NamedTuple):
  """One row of data: a question or messages, and what a grader needs to judge a reply."""

  id: str  # stable: a hash of source, prompt and answer
  question: str  # '' where the prompt is messages
  messages: tuple[dict[str, str], ...]  # () where it is a question; else role, content
  answer: str  # '' only where the source's own grader knows better (some reasoning-gym tasks)
  source: str  # names the data in metrics: val-core/<source>/...
  extra: dict[str, Any]  # everything else, handed to the grader


class Prompts(NamedTuple):
  """The prompts of one step."""

  tokens_PxL: Array  # int32, right-padded
  length_P: Array  # int32, in tokens
  index_P: Array  # int32, the row in the data set: keys the randomness and the posterior
  born_P: Array  # int32, the step that proposed it: keys the randomness of all its rollouts, continued ones too
  expected_P: Array  # float32, tokens that a rollout of it is expected to take; 0 = unknown
  # int32: a prompt may fill several slots of a step, and this says which of them; None: each fills one
  part_P: Array | None = None
  # float32, what its rows count where prompts get more or fewer of them by design; None: all 1
  weight_P: Array | None = None
  # int32, which strategy its question was given, −1 for none; None: there are no strategies
  context_P: Array | None = None
  # float32, the share of a known answer that it was told; None: none ever is
  hint_P: Array | None = None
  # int32 [P, T]: completions are several prompts with their replies, numbered from 1 up, 0 for padding; each sees
  # itself alone, and there is no other prompt; None: they are replies to the prompts
  segment_PxT: Array | None = None


class Turns(NamedTuple):
  """Who said what in rows that an environment answers: sampled turns, and what it gave in between."""

  number_BxT: (
    Array  # int32, which turn of its row a token was sampled in, from 0 up; −1 where it was given
  )
  reward_BxT: Array  # float32, what the environment paid for a turn, at its last token; 0 elsewhere
  state_BxT: (
    Array  # int32, names what the environment had shown before the turn, at the turn's tokens
  )
  outcome_B: Array  # int8, one of grade.OUTCOMES: how the environment itself fared


class Rollout(NamedTuple):
  """What `generate` returns, and what it may begin from: G completions of each prompt."""

  tokens_BxT: Array  # int32, right-padded
  logp_BxT: Array  # float32, log-probability under the distribution that was really sampled
  length_B: Array  # int32, in tokens, the end token included
  reason_B: Array  # int8, one of UNFINISHED, STOPPED, TRUNCATED
  version_BxT: Array  # int32, optimizer steps taken by the weights that sampled the token
  # float32, 1 / the probability that the row was kept; 1 where nothing chose between rows
  weight_B: Array
  # float32, the hidden state that a row was judged by; F = 0 where nothing judges
  feature_BxF: Array
  # None: all tokens were sampled, in one turn. What was given is learned from nowhere
  turns: Turns | None = None
  # uint8 or uint16 [B, T, N, k]: the experts of N layers that a token went to when the next one was sampled. The last
  # token of a row has been nowhere. None: nobody asks
  expert_BxTxNxk: Array | None = None
  # float32 [B, M]: what the exit rule remembers of a row, for the call that continues it; None: there is no rule
  memory_BxM: Array | None = None
  # int32, the step whose noise drew a token: before born_P where a draft brought it. None: nothing draws by it again
  noise_BxT: Array | None = None


class Batch(NamedTuple):
  """What `update` learns from. An empty batch has length_B = 0 everywhere.

  A group is mixed where the scores of its rows differ by more than 1e-6 (`scores.SAME`). The score is `reward_B`:
  config.rewards.fn's plus the weighted config.rewards.parts and an environment's pay, in units of the reward function;
  with config.rewards.vote the vote's 0 or 1. A method whose advantage takes each reward alone (GDPO) compares each of
  nonzero weight. Scores are final: of the truncated text and of the replaced label, where config.rewards.truncate and
  config.curriculum.labels grade again, and `config.rewards.failed.value` where a failure scores. Length shaping
  (config.objective.reward_shaping), KL and hints change no score. Rows that do not exist (length 0) count nowhere; those of
  all of a prompt's slots are one group; replayed rows (config.replay.reuse) belong to it in the update, and are no evidence
  to the curriculum.

  Success is another question, that of the posterior: `success_B` is config.rewards.fn's own score, parts aside, scaled
  to [0, 1] by config.rewards.bounds, and `correct_B` whether it reaches config.rewards.right.
  """

  prompts: Prompts
  rollout: Rollout
  reward_B: Array  # float32
  correct_B: Array  # float32 in {0, 1}: the answer is right
  # One row a prompt, of length 0 where there is none; log-probs as recorded, 0 throughout a row: unknown.
  demo: Rollout | None = None  # None: the method learns from no demonstrations
  # float32 in {0, 1}: rows of an earlier visit, whose log-probabilities nobody remembers; None: there are none
  replayed_B: Array | None = None
  # float32, each of the rewards that reward_B is the weighted sum of; None: the method looks at the sum alone
  parts_BxK: Array | None = None
  # float32 in [0, 1], what share of a success each row is; on the host alone. None: correct_B
  success_B: Array | None = None

  @property
  def success(self) -> Array:
    """`success_B`, or where there is none `correct_B`."""
    return self.correct_B if self.success_B is None else self.success_B


class TrainState(NamedTuple):
  """Everything on the device that outlives a step."""

  params: Any  # float32, trained: the weights, or with LoRA the adapter
  opt_state: Any
  step: Array  # int32, optimizer steps taken
  skipped: Array  # int32, consecutive updates skipped for a non-finite gradient
  seed: (
    Array  # int32, keys all noise; an argument of the program, so that other seeds need no new one
  )
  correctness_head: Any = None  # with pruning
  # float32 weights at the start, for methods with a reference model; with LoRA `base` is the reference
  reference: Any = None
  carried: tuple = ()  # carried_kv.Carried of unfinished rows, oldest first; () = encoded again
  auxiliary_model: Any = None  # learner.auxiliary_model.State
  average: Any = None  # float32 weights averaged over steps, for the old policy
  inner_steps: Any = None  # state of the loop around optimizer steps
  activation_noise: Any = None  # log sigma of each layer and its optimizer state
  teacher: Any = None  # float32, frozen; not saved in checkpoints
  base: Any = None  # with LoRA the frozen weights, matrices in the type of compute; not saved


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a decoder. Llama's are the defaults; the other families differ by what is set here."""

  vocab: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int  # of one expert, where there are experts
  max_tokens: int  # longest context the model was made for
  rope_theta: float = 10000.0
  # Hugging Face's rope_scaling as sorted (name, value) pairs, so that the config stays hashable.
  rope_scaling: tuple[tuple[str, Any], ...] = ()
  norm_eps: float = 1e-5
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: str = ''  # RMS norm of queries and keys: '' none, 'head' each head's, 'all' those of all heads at once
  tied: bool = True
  family: str = (
    'llama'  # Hugging Face's model_type: names tensors and tells nothing about their use
  )
  activation: str = 'silu'  # or gelu_tanh
  norms: str = 'before'  # RMS norms of attention and MLP stand before them, after, or both
  window: int = 0  # tokens that a sliding layer sees, the query's own among them
  sliding: tuple[bool, ...] = ()  # per layer; () = none slides
  sliding_rope_theta: float = 0.0  # of sliding layers, without scaling; 0 = they are as the others
  unrotated: tuple[bool, ...] = ()  # per layer: no rotary embedding; () = all have one
  query_scale: float = 0.0  # on q·k; 0 = 1 / √head_dim
  attention_cap: float = 0.0  # scores become cap·tanh(score / cap); 0 = as they are
  logit_cap: float = 0.0  # the same of logits
  embed_scale: float = 1.0  # on embeddings, not on the head tied to them
  experts: int = 0  # E; 0 = a dense MLP
  experts_per_token: int = 0
  norm_top_k: bool = False  # the chosen experts' weights add up to 1

  @property
  def slides(self) -> tuple[bool, ...]:
    """Of every layer, whether its window slides. Source: none."""
    return self.sliding or (False,) * self.layers


class Model(NamedTuple):
  """A model ready for use: `models.load` returns one."""

  config: ModelConfig
  params: Any
  tokenizer: Any  # models.tokenizer.Tokenizer
  name: str
