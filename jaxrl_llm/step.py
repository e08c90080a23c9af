"""The one compiled program of a step: learn from the rollouts just graded, then sample with the new weights."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import data
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import auxiliary_model, lora
from jaxrl_llm.learner.generate import generate, trust
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.learner.update import update
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import carried_kv, correctness_head, early_exit, slot_loop
from jaxrl_llm.types import Batch, Prompts, Rollout, TrainState, Turns

# A donated batch frees its rollouts; its prompts have no output of their shape to live on in, which jax reports.
warnings.filterwarnings('ignore', message='Some donated buffers were not usable')


def step(
  spec: StepSpec,
  state: TrainState,
  batch: Batch,
  prompts: Prompts,
  begun: Rollout | None = None,
  draft: Rollout | None = None,
  cap: jax.Array | None = None,
) -> tuple[TrainState, Rollout, dict[str, jax.Array]]:
  """One step: update on `batch`, then G rollouts of each of `prompts` with the new weights.

  `begun` holds rollouts of these prompts that earlier steps left unfinished, `draft` answers from an
  earlier visit for rows that begin, `cap` the most tokens a row may take now (at most T). Source: none.
  """
  state, metrics = update(spec, state, batch)
  rollout, sampled, left = generate(spec, state, prompts, begun, draft, cap)
  return state._replace(carried=left), rollout, metrics | sampled


def init_state(spec: StepSpec, params: Any, teacher: Any = None, adapter: Any = None) -> TrainState:
  """A TrainState on the mesh, from parameters anywhere, the teacher's where there is one.

  With LoRA, `adapter` is the one to begin from; None: a fresh one. Source: none.
  """
  given = params, teacher, adapter
  given = sharding.put(given, _cut(spec, given))
  make = functools.partial(_fresh, spec)
  shardings = _layout(spec, jax.eval_shape(make, *given))
  return jax.jit(make, out_shardings=shardings)(*given)


def without_frozen(state: TrainState) -> TrainState:
  """What a checkpoint holds: not the weights that nobody changes, which can be loaded again. Source: none."""
  return state._replace(teacher=None, base=None)


def with_frozen(spec: StepSpec, state: TrainState, params: Any, teacher: Any = None) -> TrainState:
  """Back from `without_frozen`, with the parameters of model and teacher from anywhere. Source: none."""
  base = _base(spec, params)
  base, teacher = sharding.put((base, teacher), _cut(spec, (base, teacher)))
  return state._replace(base=base, teacher=teacher)


def weights(spec: StepSpec, state: TrainState) -> Any:
  """What `generate` samples with, for evaluation: what is trained, or base and adapter. Source: none."""
  if state.base is None:
    return state.params
  shardings = jax.tree.map(lambda x: x.sharding, abstract_weights(spec))
  return jax.jit(_sampled(spec), out_shardings=shardings)(state.base, state.params)


def abstract_weights(spec: StepSpec) -> Any:
  """The shapes and shardings of `weights`. Source: none."""
  state = abstract_state(spec)
  if state.base is None:
    return state.params
  shapes = jax.eval_shape(_sampled(spec), state.base, state.params)
  return _with(shapes, _cut(spec, shapes))


def _sampled(spec: StepSpec) -> Callable:
  alpha, dtype = spec.model.lora.alpha, spec.model.dtype
  return lambda base, adapter: lora.sampled(base, adapter, alpha, dtype)


def merged(spec: StepSpec, state: TrainState) -> Any:
  """One model for others: what is trained, or base and adapter as one, in float32. Source: none."""
  if state.base is None:
    return state.params
  merge = lambda base, adapter: lora.merged(base, adapter, spec.model.lora.alpha)  # noqa: E731
  return jax.jit(merge, out_shardings=_cut(spec, state.base))(state.base, state.params)


def _base(spec: StepSpec, params: Any) -> Any:
  return lora.frozen(params, spec.model.dtype) if spec.model.lora else None


def _fresh(spec: StepSpec, params: Any, teacher: Any, adapter: Any = None) -> TrainState:
  companied, base = auxiliary_model.init(spec, params), _base(spec, params)
  if spec.model.lora:
    params = lora.init(spec.model.lora, params, spec.seed) if adapter is None else adapter
  judging = (
    correctness_head.init(spec.rollout.features, spec.seed) if spec.rollout.pruning else None
  )
  kept = spec.objective.method.needs_reference and base is None
  reference = jax.tree.map(jnp.copy, params) if kept else None
  opt_state, zero = spec.update.optimizer.init(params), jnp.int32(0)
  average = jax.tree.map(jnp.copy, params) if spec.objective.method.needs_average else None
  outer = spec.update.inner_steps.fresh() if spec.update.inner_steps else None
  noise = (
    spec.update.activation_noise.fresh(spec.model.config.layers)
    if spec.update.activation_noise
    else None
  )
  handed = (
    carried_kv.empty(spec.model.config, spec.rollout.decode, spec.layout.prompts)
    for _ in range(spec.rollout.carried_calls)
  )
  return TrainState(
    params,
    opt_state,
    step=zero,
    skipped=zero,
    seed=jnp.int32(spec.seed),
    judge=judging,
    reference=reference,
    carried=tuple(handed),
    auxiliary_model=companied,
    average=average,
    outer=outer,
    noise=noise,
    teacher=teacher,
    base=base,
  )


def _layout(spec: StepSpec, shapes: TrainState) -> TrainState:
  placed = _cut(spec, shapes._replace(carried=()))
  return placed._replace(carried=sharding.cache_layout(shapes.carried, spec.layout.mesh))


def _cut(spec: StepSpec, tree: Any) -> Any:
  return sharding.layout(tree, spec.layout.mesh, spec.layout.rules)


def abstract_state(spec: StepSpec) -> TrainState:
  """The shapes and shardings of `init_state`, nothing allocated. Source: none."""
  teacher = decoder.abstract_params(spec.model.teacher) if spec.model.teacher else None
  shapes = jax.eval_shape(
    functools.partial(_fresh, spec), decoder.abstract_params(spec.model.config), teacher
  )
  return _with(shapes, _layout(spec, shapes))


def _with(shapes: Any, shardings: Any) -> Any:
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
  return jax.tree.map(place, shapes, shardings)


def empty_rollout(spec: StepSpec, prompts: int | None = None) -> Rollout:
  """Rows without tokens, to begin from: host arrays, for `prompts` of them or those of a step."""
  count = spec.layout.prompts if prompts is None else prompts
  rollout = _empty_rows(spec, count * spec.rollout.decode.rollouts)
  memory_BxM = np.zeros((len(rollout.length_B), early_exit.MEMORY_SIZE), np.float32)
  return rollout._replace(
    memory_BxM=memory_BxM if spec.rollout.exit_memory else None,
    noise_BxT=np.zeros_like(rollout.tokens_BxT) if spec.rollout.drafts.records_noise else None,
  )


def _empty_rows(spec: StepSpec, B: int) -> Rollout:
  T = spec.rollout.decode.max_tokens
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  return Rollout(
    tokens_BxT=zeros(B, T),
    logp_BxT=np.zeros((B, T), np.float32),
    length_B=zeros(B),
    reason_B=np.zeros(B, np.int8),
    version_BxT=zeros(B, T),
    weight_B=np.ones(B, np.float32),
    feature_BxF=np.zeros((B, spec.rollout.features), np.float32),
    turns=unsaid(B, T) if spec.rollout.multi_turn else None,
    expert_BxTxNxk=_unrouted(spec, B, T) if spec.rollout.decode.record_experts else None,
  )


def _unrouted(spec: StepSpec, rows: int, T: int) -> np.ndarray:
  told = slot_loop.expert_shape(spec.model.config)
  return np.zeros((rows, T, *told.shape), told.dtype)


def unsaid(rows: int, T: int) -> Turns:
  """Of rows that hold nothing yet: host arrays. Source: none."""
  zeros = lambda kind: np.zeros((rows, T), kind)  # noqa: E731
  return Turns(zeros(np.int32) - 1, zeros(np.float32), zeros(np.int32), np.zeros(rows, np.int8))


def empty_batch(spec: StepSpec) -> Batch:
  """A batch of no rollouts, to start with: host arrays. Source: none."""
  P, L, B = spec.layout.prompts, spec.layout.prompt_tokens, spec.layout.prompts * spec.layout.group
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  prompts = Prompts(
    tokens_PxL=zeros(P, L),
    length_P=zeros(P),
    index_P=zeros(P),
    born_P=zeros(P),
    expected_P=np.zeros(P, np.float32),
    part_P=zeros(P) if spec.layout.slots_per_prompt > 1 else None,
    weight_P=np.ones(P, np.float32) if spec.layout.slots_per_prompt > 1 else None,
    context_P=np.full(P, -1, np.int32) if spec.layout.contexts else None,
    hint_P=np.zeros(P, np.float32) if spec.layout.hints else None,
  )
  rollout = _empty_rows(spec, B)
  demo = data.supervised(zeros(P, spec.rollout.decode.max_tokens), zeros(P))
  return Batch(
    prompts,
    rollout,
    reward_B=np.zeros(B, np.float32),
    correct_B=np.zeros(B, np.float32),
    demo=demo if spec.objective.method.needs_demo else None,
    replayed_B=np.zeros(B, np.float32)
    if spec.layout.group > spec.rollout.decode.rollouts
    else None,
    parts_BxK=np.zeros((B, len(spec.objective.method.weight_K)), np.float32)
    if spec.objective.method.needs_parts
    else None,
  )


def compile_step(spec: StepSpec) -> Callable:
  """`step` as one jit: (state, batch, prompts, begun, draft, cap), state and batch donated.

  Source: none.
  """
  state = jax.tree.map(lambda x: x.sharding, abstract_state(spec))
  rows, whole = sharding.rows(spec.layout.mesh), sharding.replicated(spec.layout.mesh)
  given = (state, rows, rows, rows, rows, whole)
  run = functools.partial(step, spec)
  return _compiled(spec, run, given, (state, rows, whole), donated=(0, 1))


def compile_split(spec: StepSpec) -> Callable:
  """What `compile_step` returns, as two programs one after the other: they compile faster, and waste the overlap.

  Source: none.
  """
  learn, sample = compile_update(spec), compile_sample(spec)

  def call(state, batch, *asked):
    state, metrics = learn(state, batch)
    rollout, sampled, left = sample(state._replace(carried=()), state.carried, *asked)
    return state._replace(carried=left), rollout, metrics | sampled

  return call


def compile_sample(spec: StepSpec) -> Callable:
  """The sampling half alone: (state without `carried`, carried, prompts, begun, draft, cap), `carried` donated.

  Source: none.
  """
  rows, whole = sharding.rows(spec.layout.mesh), sharding.replicated(spec.layout.mesh)
  state = jax.tree.map(lambda x: x.sharding, abstract_state(spec))

  def sample(state, handed, *asked):
    return generate(spec, state._replace(carried=handed), *asked)

  given = (state._replace(carried=()), state.carried, rows, rows, rows, whole)
  return _compiled(spec, sample, given, (rows, whole, state.carried), donated=(1,))


def compile_generate(spec: StepSpec) -> Callable:
  """`generate` alone, for evaluation: (whole weights, prompts, seed, begun or None) → Rollout. Source: none."""
  params = jax.tree.map(lambda x: x.sharding, abstract_weights(spec))
  rows = sharding.rows(spec.layout.mesh)

  def run(params, prompts, seed, begun):
    return generate(spec, frozen(params, seed=seed), prompts, begun)[0]

  return _compiled(spec, run, (params, rows, sharding.replicated(spec.layout.mesh), rows), rows)


def compile_trust(spec: StepSpec) -> Callable:
  """`trust` alone, for evaluation: (whole weights, judge, prompts, their rollout) → p_B. Source: none."""
  params = jax.tree.map(lambda x: x.sharding, abstract_weights(spec))
  rows = sharding.rows(spec.layout.mesh)

  def run(params, judging, prompts, rollout):
    return trust(spec, frozen(params)._replace(judge=judging), prompts, rollout)

  return _compiled(spec, run, (params, sharding.replicated(spec.layout.mesh), rows, rows), rows)


def frozen(params: Any, version: int = 0, seed: jax.Array | int = 0) -> TrainState:
  """Weights to sample with and not to learn with. Source: none."""
  return TrainState(params, (), jnp.int32(version), jnp.int32(0), jnp.int32(seed))


def compile_update(spec: StepSpec) -> Callable:
  """`update` alone, for a supervised warm start: (state, batch), both donated. Source: none."""
  state = jax.tree.map(lambda x: x.sharding, abstract_state(spec))
  rows, whole = sharding.rows(spec.layout.mesh), sharding.replicated(spec.layout.mesh)
  run = functools.partial(update, spec)
  return _compiled(spec, run, (state, rows), (state, whole), donated=(0, 1))


def _compiled(
  spec: StepSpec, run: Callable, given: tuple, returned: Any, donated: tuple[int, ...] = ()
) -> Callable:
  """`run` as a jit for the mesh, from shardings `given` to those `returned`.

  Of several processes jit takes arrays of the whole mesh alone, and what comes from the host is not.
  """
  compiled = jax.jit(
    run,
    donate_argnums=donated,
    in_shardings=given,
    out_shardings=returned,
    compiler_options=hardware.compiler_options(spec.layout.mesh.devices.flat[0]),
  )
  if jax.process_count() == 1:
    return compiled
  return lambda *args: compiled(*sharding.put(args, given))
