"""The TrainState of a step: its first values, its shardings, and the weights that are sampled with or saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import auxiliary_model, lora
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import blockwise, decoder
from jaxrl_llm.rollout import carried_kv, correctness_head
from jaxrl_llm.types import TrainState, UserError

Weights = Any  # a tree of arrays, as models.load returns it; with LoRA also the tree of an adapter


def init_state(
  spec: StepSpec, params: Weights, teacher: Weights = None, adapter: Weights = None
) -> TrainState:
  """A TrainState on the mesh, from weights on any device.

  With LoRA, `adapter` is the adapter to begin from; None: a new one.
  """
  weights = _quantized_base(spec, params), teacher, adapter
  weights = sharding.put(weights, _shardings(spec, weights))
  make = functools.partial(_first_state, spec)
  shardings = _state_shardings(spec, jax.eval_shape(make, *weights))
  return jax.jit(make, out_shardings=shardings)(*weights)


def abstract_state(spec: StepSpec) -> TrainState:
  """Shapes and shardings of `init_state`; nothing is allocated."""
  teacher = decoder.abstract_params(spec.model.teacher) if spec.model.teacher else None
  params = _quantized_base(spec, decoder.abstract_params(spec.model.config))
  shapes = jax.eval_shape(functools.partial(_first_state, spec), params, teacher)
  return _placed(shapes, _state_shardings(spec, shapes))


def sampling_state(params: Weights, version: int = 0, seed: jax.Array | int = 0) -> TrainState:
  """Weights to sample with; `update` cannot use this state."""
  return TrainState(params, (), jnp.int32(version), jnp.int32(0), jnp.int32(seed))


def without_frozen(state: TrainState) -> TrainState:
  """The state as a checkpoint holds it, without frozen weights, which can be loaded again."""
  return state._replace(teacher=None, base=None)


def with_frozen(
  spec: StepSpec, state: TrainState, params: Weights, teacher: Weights = None
) -> TrainState:
  """The inverse of `without_frozen`, from the weights of model and teacher on any device."""
  base = _base(spec, _quantized_base(spec, params))
  base, teacher = sharding.put((base, teacher), _shardings(spec, (base, teacher)))
  return state._replace(base=base, teacher=teacher)


def sampling_weights(spec: StepSpec, state: TrainState) -> Weights:
  """The weights that evaluation samples with: those that are trained, or base and adapter joined."""
  if state.base is None:
    return state.params
  shardings = jax.tree.map(lambda x: x.sharding, abstract_sampling_weights(spec))
  return jax.jit(_join_adapter(spec), out_shardings=shardings)(state.base, state.params)


def abstract_sampling_weights(spec: StepSpec) -> Weights:
  """Shapes and shardings of `sampling_weights`."""
  state = abstract_state(spec)
  if state.base is None:
    return state.params
  shapes = jax.eval_shape(_join_adapter(spec), state.base, state.params)
  return _placed(shapes, _shardings(spec, shapes))


def merged_weights(spec: StepSpec, state: TrainState) -> Weights:
  """The model to save, in float32: the weights that are trained, or base and adapter merged."""
  if state.base is None:
    return state.params
  alpha = _lora(spec).alpha
  if _lora(spec).base_dtype != 'auto':  # the unpacked weights may not fit on the device
    base, adapter = sharding.fetch((state.base, state.params))
    with jax.default_device(sharding.host_device()):
      return lora.merge(base, adapter, alpha)
  merge = lambda base, adapter: lora.merge(base, adapter, alpha)  # noqa: E731
  return jax.jit(merge, out_shardings=_shardings(spec, state.base))(state.base, state.params)


def _lora(spec: StepSpec) -> lora.LoraSettings:
  if spec.model.lora is None:
    raise ValueError('the state has a base and the spec has no LoRA settings')
  return spec.model.lora


def _join_adapter(spec: StepSpec) -> Callable[[Weights, Weights], Weights]:
  settings, dtype = _lora(spec), spec.model.dtype
  return lambda base, adapter: lora.for_sampling(base, adapter, settings, dtype)


def _quantized_base(spec: StepSpec, params: Weights) -> Weights:
  """`params` on the host with the frozen kernels of config.lora.base_dtype; unchanged where that is auto."""
  settings = spec.model.lora
  if settings is None or settings.base_dtype == 'auto':
    return params
  return blockwise.quantize_params(params, settings.base_dtype, spec.model.dtype)


def check_base(spec: StepSpec) -> None:
  """Raises UserError for a mesh that cuts a quantized kernel elsewhere than between blocks of its inputs."""
  if spec.model.lora is None or spec.model.lora.base_dtype == 'auto':
    return
  params = _quantized_base(spec, decoder.abstract_params(spec.model.config))
  kernels, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=blockwise.is_blockwise)
  placed = jax.tree.leaves(_shardings(spec, params), is_leaf=blockwise.is_blockwise)
  for (path, kernel), sharding_of in zip(kernels, placed, strict=True):
    if blockwise.is_blockwise(kernel) and sharding_of.data.spec[0] != sharding_of.scale.spec[0]:
      name, shards = path[-2].key, kernel.shape[0] // sharding_of.data.shard_shape(kernel.shape)[0]
      raise UserError(
        f'config.mesh cuts the {kernel.shape[0]} inputs of {name!r} into {shards} parts, and their scales are '
        f'those of {len(kernel.scale)} blocks; set its axes so that whole blocks are on a device, or '
        '--config.lora.base_dtype=auto.'
      )


def _base(spec: StepSpec, params: Weights) -> Weights:
  if spec.model.lora is None:
    return None
  return lora.freeze(params, spec.model.dtype) if spec.model.lora.base_dtype == 'auto' else params


def _first_state(
  spec: StepSpec, params: Weights, teacher: Weights, adapter: Weights = None
) -> TrainState:
  """The state before the first step. Traced by jit: the order of operations decides the compiled program."""
  method, rollout = spec.objective.method, spec.rollout
  auxiliary, base = None, _base(spec, params)
  if method.auxiliary_model is not None:
    auxiliary = auxiliary_model.init(spec, params)
  if spec.model.lora:
    params = lora.init(spec.model.lora, params, spec.seed) if adapter is None else adapter
  head = correctness_head.init(rollout.features, spec.seed) if rollout.pruning else None
  if rollout.length_head is not None:
    head = rollout.length_head.init(rollout.features, spec.seed)
  if rollout.drafts.head is not None:
    head = rollout.drafts.head.init(spec.model.config.width, spec.seed)
  # With LoRA the base is the reference, and no copy is needed.
  copies_reference = method.needs_reference and base is None
  reference = jax.tree.map(jnp.copy, params) if copies_reference else None
  opt_state, zero = spec.update.optimizer.init(params), jnp.int32(0)
  average = jax.tree.map(jnp.copy, params) if method.needs_average else None
  loop, noise = spec.update.inner_steps, spec.update.activation_noise
  bonus = spec.objective.entropy_bonus
  inner_steps = loop.init() if loop else None
  activation_noise = noise.fresh(spec.model.config.layers) if noise else None
  carried = (
    carried_kv.empty(spec.model.config, rollout.decode, spec.layout.prompts)
    for _ in range(rollout.carried_calls)
  )
  return TrainState(
    params,
    opt_state,
    step=zero,
    skipped=zero,
    seed=jnp.int32(spec.seed),
    rollout_head=head,
    reference=reference,
    carried=tuple(carried),
    auxiliary_model=auxiliary,
    average=average,
    inner_steps=inner_steps,
    activation_noise=activation_noise,
    entropy_bonus=bonus.init() if bonus else None,
    teacher=teacher,
    base=base,
  )


def _state_shardings(spec: StepSpec, shapes: TrainState) -> TrainState:
  shardings = _shardings(spec, shapes._replace(carried=()))
  return shardings._replace(carried=sharding.cache_layout(shapes.carried, spec.layout.mesh))


def _shardings(spec: StepSpec, tree: Any) -> Any:
  return sharding.layout(tree, spec.layout.mesh, spec.layout.rules)


def _placed(shapes: Any, shardings: Any) -> Any:
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
  return jax.tree.map(place, shapes, shardings)
