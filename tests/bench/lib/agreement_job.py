"""A decoder in bfloat16 whose completions are sampled, then scored by the update, with and without each mend."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import generate, microbatch
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.learner.state import sampling_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decoder, exact, linear, logprob
from jaxrl_llm.rollout import ring_decode
from jaxrl_llm.types import Batch, ModelConfig, Params, Prompts, Rollout

# SmolLM2-135M has 30 layers.
SMOLLM2 = dict(vocab=49152, width=576, heads=9, kv_heads=3, head_dim=64, mlp=1536)
QWEN3 = dict(vocab=4096, width=256, heads=4, kv_heads=2, head_dim=64, mlp=768, qk_norm='head')


class Sizes(NamedTuple):
  """Of a batch; completions differ in length where `ends` tokens of the vocabulary end them."""

  prompts: int = 4
  rollouts: int = 8
  prompt_tokens: int = 47
  completion_tokens: int = 40
  slots: int = 12
  ends: int = 0


def step_spec(shape: dict[str, Any], sizes: Sizes, **settings: Any) -> StepSpec:
  """The spec of a step; `settings` are fields of the config, with __ for a point."""
  c = configs.default()
  c.dtype, c.optimizer.learning_rate = 'bfloat16', 1e-4
  c.prompts, c.rollouts, c.rollout.slots = sizes.prompts, sizes.rollouts, sizes.slots
  c.prompt_tokens, c.completion_tokens = sizes.prompt_tokens, sizes.completion_tokens
  for name, value in settings.items():
    section, _, field = name.rpartition('__')
    (c[section] if section else c)[field] = value
  model = ModelConfig(max_tokens=2048, **shape)
  ends = tuple(range(0, sizes.ends * 7, 7))
  return make_spec(c, model, ends, sharding.make_mesh(c.mesh, jax.devices()[:1]))


def weights(spec: StepSpec) -> Params:
  """Random weights whose norms are not 1 and whose logits differ, so that log-probs of samples are about −3."""
  params = decoder.init(spec.model.config, 0)
  random = np.random.default_rng(0)

  def spread(path, x):
    names = [str(getattr(entry, 'key', '')) for entry in path]
    if names[-1] == 'scale':
      return x * random.uniform(0.5, 1.5, x.shape).astype(np.float32)
    return x * 3 if names[-1] == 'embedding' else x

  return jax.tree_util.tree_map_with_path(spread, params)


def prompts(spec: StepSpec, seed: int = 0) -> Prompts:
  """Random prompts of different lengths, one of them odd and one the longest."""
  P, L = spec.layout.prompts, spec.layout.prompt_tokens
  random = np.random.default_rng(seed)
  length_P = random.integers(L // 3, L + 1, P).astype(np.int32)
  length_P[0], length_P[-1] = L, (L // 3) | 1
  tokens_PxL = random.integers(0, spec.model.config.vocab, (P, L)).astype(np.int32)
  index_P = np.arange(P, dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P, index_P * 0, np.zeros(P, np.float32))


def sample(spec: StepSpec, params: Params, prompts: Prompts) -> Rollout:
  """As the step samples."""
  return generate.generate(spec, sampling_state(params, seed=0), prompts)[0]


def sample_without_mesh(spec: StepSpec, params: Params, prompts: Prompts) -> Rollout:
  """The same loop outside a shard_map, inside which callbacks do not run."""
  dtype = spec.model.dtype
  inputs = ring_decode.DecodeInputs(
    linear.for_decoding(params, dtype, dtype), prompts, jax.random.key(0), 0
  )
  return ring_decode.generate(spec.model.config, spec.rollout.decode, inputs)[0]


def score(spec: StepSpec, params: Params, prompts: Prompts, rollout: Rollout) -> jax.Array:
  """The log-probs [B, T] that the update computes."""
  batch = Batch(prompts, rollout, rollout.length_B, rollout.length_B)
  return microbatch.all_log_probs(spec, params, microbatch.pack(spec, batch))[0]


class Gap(NamedTuple):
  """Log-probs of the sampler against those of the update, over all sampled tokens."""

  tokens: int
  differing: float  # share
  mean: float  # of |Δ log p|
  largest: float

  @classmethod
  def of(cls, rollout: Rollout, learned_BxT: jax.Array) -> Gap:
    """The gap of a rollout."""
    real = np.arange(learned_BxT.shape[1])[None] < np.asarray(rollout.length_B)[:, None]
    sampled, learned = np.asarray(rollout.logp_BxT)[real], np.asarray(learned_BxT)[real]
    gap = np.abs(sampled - learned)
    return cls(len(gap), float((sampled != learned).mean()), float(gap.mean()), float(gap.max()))


ROUNDING, ALIGNMENT, VOCABULARY = 'rounding', 'alignment', 'vocabulary'
# Mends in the order in which they were made, the cheapest first.
MENDS = {
  ROUNDING: 'values are rounded to bfloat16 wherever the model says so, not where nothing is fused',
  'products': 'products add in float32 and round once',
  'columns': 'a slot has its keys in the order of tokens, not in a ring',
  ALIGNMENT: 'prompts and completions begin in even columns of a bin',
  'parts': 'keys of the prompt and of the completion are summed apart in the update, too',
  'weights': 'the sum of the softmax has the order of the sum of values',
  'norms': 'the sums of squares have a fixed order',
  'rotary': 'cosines and sines have 16 bits, so that their products with bfloat16 are exact',
  VOCABULARY: 'the sum over the vocabulary has a fixed order',
}


@contextlib.contextmanager
def without(mends: frozenset[str]) -> Iterator[None]:
  """Traces inside have the functions of plain bfloat16 in place of these mends."""
  one_part = lambda weight, v, mask: exact.weigh_part(weight, v, 'bkqrs,bksd->bkqrd')  # noqa: E731
  plain: dict[str, tuple[Any, str, Any]] = {
    'products': (linear.ExactDense, 'product', staticmethod(linear.product)),
    'columns': (ring_decode, 'keeps_columns', lambda model: False),
    'parts': (exact, 'weigh', one_part),
    'weights': (exact, '_sum_keys', lambda weight, dtype: weight.sum(-1)),
    'norms': (exact.RMSNorm, '__call__', nnx.RMSNorm.__call__),
    'rotary': (exact, 'round_factors', lambda x: x),
    VOCABULARY: (exact, 'partition_and_entropy', logprob._log_partition),
  }
  saved = []
  for name in mends & set(plain):
    owner, attribute, new = plain[name]
    saved.append((owner, attribute, owner.__dict__[attribute]))
    setattr(owner, attribute, new)
  try:
    yield
  finally:
    for owner, attribute, old in saved:
      setattr(owner, attribute, old)


def measure(spec: StepSpec, mends: frozenset[str] | None = None) -> Gap:
  """The gap of a spec with `learner.agreement=exact` and only these mends, by default all."""
  missing = frozenset(MENDS) - (frozenset(MENDS) if mends is None else mends)
  is_exact = spec.model.config.is_exact
  options = {'xla_allow_excess_precision': not is_exact or ROUNDING in missing}
  if ALIGNMENT in missing:
    packing = spec.update.packing._replace(align=1)
    spec = spec._replace(update=spec.update._replace(packing=packing))

  def compiled(fn: Callable, *inputs: Any) -> Any:
    return jax.jit(sharding.on_mesh(functools.partial(fn)), static_argnums=0, compiler_options=options)(
      spec, *inputs
    )  # fmt: skip

  params, batch = weights(spec), prompts(spec)
  # The sampler sums the vocabulary in blocks, the update in one reduction.
  with without(missing - {VOCABULARY}):
    rollout = compiled(sample, params, batch)
  with without(missing):
    return Gap.of(rollout, compiled(score, params, batch, jax.tree.map(jnp.asarray, rollout)))
