"""All layers of a decoder, one after the other or in loops over layers of equal structure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import linear
from jaxrl_llm.models.mixer import Cache, LayerCache, RowStates
from jaxrl_llm.models.positions import LayerMasks, layer_kinds
from jaxrl_llm.types import Array, ModelConfig, Params


class LayerInputs(NamedTuple):
  """Inputs of a block besides x and its masks; of all layers, each field is a list, or stacked for a scan."""

  weights: Params
  prompt: Cache | None  # of the shared prompt
  cache: Cache | None
  noise: tuple[jax.Array, jax.Array] | None  # standard deviation and key
  expert_BxQxk: Array | None  # of layers with a mixture of experts
  own_BxQxp: Array | None  # the input that only this layer has
  source: LayerCache | None = None  # of the layer whose keys and values it attends to


_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
# One layer: x after it, its cache, and the experts of its tokens.
Block = Callable[
  [jax.Array, LayerMasks, LayerInputs], tuple[jax.Array, tuple[LayerCache, jax.Array | None]]
]
# Run all layers, of which `blocks` holds one each: x, then caches and the experts [B, Q, N, k] of the first Q tokens.
# With `shown`, x is that after each of these layers, side by side [B, Q', len(shown)·D].
Outputs = tuple[jax.Array, Cache, jax.Array | None]


def scan_layers(
  config: ModelConfig,
  blocks: Sequence[Block],
  masks: list[LayerMasks],
  layers: LayerInputs,
  x_BxQxD: jax.Array,
  Q: int,
  dtype: str,
  shown: Sequence[int] = (),
) -> Outputs:
  """All layers as one loop, or one per `periods`, that recomputes each block in the backward pass.

  A TPU's compiler takes most of a minute for each block that it compiles, and so compiles few.
  """
  kv_parts, expert_parts = [], []
  x_of: dict[int, jax.Array] = {}
  kind_L = layer_kinds(config)[1]
  kv_of: dict[int, LayerCache] = {}
  for period in periods(config.structures):
    runs = [_loop_body(masks, blocks[i[0]], {kind_L[n] for n in i}) for i in period]
    inputs = [_stacked(config, layers, numbers, kind_L, dtype) for numbers in period]
    common = [_of_source(config, layers, kv_of, i[0]) for i in period]

    def body(x, inputs, runs=runs, common=common):
      outputs, states = [], []
      for run, (kind, layer), fields in zip(runs, inputs, common, strict=True):
        x, output = run(x, (kind, layer._replace(**fields)))
        outputs.append(output)
        states += [x] if shown else []
      return x, (outputs, states)

    x_BxQxD, (outputs, states) = jax.lax.scan(body, x_BxQxD, inputs)
    for numbers, state in zip(period if shown else (), states, strict=True):
      x_of |= {n: state[numbers.index(n)] for n in numbers if n in shown}
    kv_parts += [(numbers, kv) for numbers, (kv, _) in zip(period, outputs, strict=True)]
    for part in kv_parts[-len(period) :] if config.kv_readers else ():
      kv_of |= _unstacked(*part)
    expert_parts += [(numbers, e) for numbers, (_, e) in zip(period, outputs, strict=True)]
  if shown:
    x_BxQxD = jnp.concatenate([x_of[n] for n in shown], -1)
  experts = [(numbers, e) for numbers, e in expert_parts if e is not None]
  first_tokens = lambda x: x[..., :Q, :]  # noqa: E731
  if not config.has_equal_caches:
    kv_L = _by_layer(kv_parts, Q)
  else:
    order = [number for numbers, _ in kv_parts for number in numbers]
    kv = jax.tree.map(lambda *x: _in_order(order, x), *(kv for _, kv in kv_parts))
    kv_L = jax.tree.map(first_tokens, kv)
  if not experts:
    return x_BxQxD, kv_L, None
  expert_order = [number for numbers, _ in experts for number in numbers]
  expert_N = first_tokens(_in_order(expert_order, [e for _, e in experts]))
  return x_BxQxD, kv_L, jnp.moveaxis(expert_N, 0, 2)


def periods(kind_L: Sequence[object]) -> list[list[list[int]]]:
  """Divides layers into loops; of each, the numbers of the layers at each place of its period.

  Each loop takes the period of kinds that repeats most often from its first layer on: alternating layers are one loop
  over pairs, and a dense layer before many mixtures is a loop of its own.
  """
  loops, first, count = [], 0, len(kind_L)
  while first < count:

    def repeats(length, first=first):
      places = range(first, count - length + 1, length)
      wrong = (i for i in places if kind_L[i : i + length] != kind_L[first : first + length])
      return (next(wrong, places[-1] + length) - first) // length

    length = max(range(1, (count - first) // 2 + 2), key=repeats) if count - first > 1 else 1
    end = first + length * repeats(length)
    loops.append([list(range(first + j, end, length)) for j in range(length)])
    first = end
  return loops


def _of_source(
  config: ModelConfig, layers: LayerInputs, kv_of: dict[int, LayerCache] | list[LayerCache], i: int
) -> dict[str, object]:
  """Fields of layer i's inputs that come from the layer whose keys and values it attends to, if there is one."""
  if (source := config.source(i)) is None:
    return {}
  return dict(source=kv_of[source], prompt=layers.prompt and layers.prompt[source])


def _stacked(
  config: ModelConfig, layers: LayerInputs, numbers: list[int], kind_L: Sequence[int], dtype: str
) -> tuple[jax.Array, LayerInputs]:
  """Kinds and inputs of the given layers, as arrays [len(numbers), …]."""
  select = lambda x: x if len(numbers) == len(x) else x[np.array(numbers)]  # noqa: E731
  prompt = layers.prompt
  if isinstance(prompt, list):  # of layers with unequal caches
    prompt = jax.tree.map(lambda *x: jnp.stack(x), *[prompt[i] for i in numbers])
  else:
    prompt = jax.tree.map(select, prompt)
  noise, own = jax.tree.map(select, (layers.noise, layers.own_BxQxp))
  expert, places = layers.expert_BxQxk, [config.mixture_place(i) for i in numbers]
  if expert is not None and len(places) < config.mixtures:
    expert = None if None in places else expert[np.array(places)]
  weights = stack_weights([layers.weights[i] for i in numbers], dtype)
  inputs = LayerInputs(weights, prompt, None, noise, expert, own)
  return jnp.array([kind_L[i] for i in numbers]), inputs


def _by_layer(parts: Sequence[tuple[list[int], LayerCache]], Q: int) -> list[LayerCache]:
  """Caches [layers, …] of the numbered layers of all places, as one of each layer: of the first Q tokens, or states."""
  layers: dict[int, LayerCache] = {}
  for numbers, part in parts:
    part = part if isinstance(part, RowStates) else tuple(x[..., :Q, :] for x in part)
    layers |= _unstacked(numbers, part)
  return [layers[number] for number in sorted(layers)]


def _unstacked(numbers: list[int], kv: LayerCache) -> dict[int, LayerCache]:
  """Number → cache of each of the given layers, from arrays [layers, …]."""
  leaves, structure = jax.tree.flatten(kv)
  if not leaves:
    return dict.fromkeys(numbers, kv)
  arrays_L = zip(*leaves, strict=True)
  return {n: structure.unflatten(arrays) for n, arrays in zip(numbers, arrays_L, strict=True)}


def _in_order(order: list[int], parts: Sequence[jax.Array]) -> jax.Array:
  """Arrays [layers, …] of several loops as one, sorted by the numbers of the layers."""
  if len(parts) == 1:
    return parts[0]
  return jnp.concatenate(parts)[np.argsort(order)]


def unroll_layers(
  config: ModelConfig,
  blocks: Sequence[Block],
  masks: list[LayerMasks],
  layers: LayerInputs,
  x_BxQxD: jax.Array,
  Q: int,
  dtype: str,
  shown: Sequence[int] = (),
) -> Outputs:
  """All layers one after the other, with a cache for each or none."""
  del dtype  # each layer casts its own weights
  kv_L, kv_of, expert_N, x_L = [], [], [], []
  for i, kind in enumerate(layer_kinds(config)[1]):
    layer = _layer(config, layers, i)._replace(**_of_source(config, layers, kv_of, i))
    x_BxQxD, (kv, expert) = blocks[i](x_BxQxD, masks[kind], layer)
    x_L.append(x_BxQxD)
    kv_of.append(kv)
    is_whole = layers.cache is not None or isinstance(kv, RowStates)
    kv_L.append(kv if is_whole else tuple(x[:, :, :Q] for x in kv))
    expert_N += [] if expert is None else [expert]
  if shown:
    x_BxQxD = jnp.concatenate([x_L[n] for n in shown], -1)
  expert_BxQxNxk = jnp.stack(expert_N, 2)[:, :Q] if expert_N else None
  return x_BxQxD, kv_L, expert_BxQxNxk


def _layer(config: ModelConfig, layers: LayerInputs, i: int) -> LayerInputs:
  noise, own = jax.tree.map(lambda x: x[i], (layers.noise, layers.own_BxQxp))
  place, expert = config.mixture_place(i), layers.expert_BxQxk
  expert = None if expert is None or place is None else expert[place]
  prompt = layers.prompt and layers.prompt[i]
  cache = None if layers.cache is None else layers.cache[i]
  return LayerInputs(layers.weights[i], prompt, cache, noise, expert, own)


def _loop_body(masks: list[LayerMasks], block: Block, kinds: set[int]) -> Callable:
  """The block as the body of a scan over (kind of layer, layer), recomputed in the backward pass.

  Masks are selected by kind, where the loop has several `kinds`; these have rotary tables of equal sizes.
  """
  if len(kinds) == 1:
    return _recomputed(lambda x, layer: block(x, masks[min(kinds)], layer[1]))
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *masks)

  def run(x, layer):
    return block(x, jax.tree.map(lambda mask: mask[layer[0]], stacked), layer[1])

  return _recomputed(run)


def stack_weights(weights_L: Sequence[Params], dtype: str) -> Params:
  """One tree of arrays [layers, …], with matrices cast to the dtype of their products."""
  return jax.tree.map(lambda *x_L: jnp.stack(x_L), *(linear.cast(w, dtype) for w in weights_L))
