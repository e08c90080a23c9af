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
from jaxrl_llm.learner.step_spec import Program
from jaxrl_llm.learner.update import update
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import carried_kv, correctness_head, early_exit, slot_loop
from jaxrl_llm.types import Batch, Prompts, Rollout, TrainState, Turns

# A donated batch frees its rollouts; its prompts have no output of their shape to live on in, which jax reports.
warnings.filterwarnings('ignore', message='Some donated buffers were not usable')


def step(
  program: Program,
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
  state, metrics = update(program, state, batch)
  rollout, sampled, left = generate(program, state, prompts, begun, draft, cap)
  return state._replace(carried=left), rollout, metrics | sampled


def init_state(
  program: Program, params: Any, teacher: Any = None, adapter: Any = None
) -> TrainState:
  """A TrainState on the mesh, from parameters anywhere, the teacher's where there is one.

  With LoRA, `adapter` is the one to begin from; None: a fresh one. Source: none.
  """
  given = params, teacher, adapter
  given = sharding.put(given, _cut(program, given))
  make = functools.partial(_fresh, program)
  shardings = _layout(program, jax.eval_shape(make, *given))
  return jax.jit(make, out_shardings=shardings)(*given)


def without_frozen(state: TrainState) -> TrainState:
  """What a checkpoint holds: not the weights that nobody changes, which can be loaded again. Source: none."""
  return state._replace(teacher=None, base=None)


def with_frozen(
  program: Program, state: TrainState, params: Any, teacher: Any = None
) -> TrainState:
  """Back from `without_frozen`, with the parameters of model and teacher from anywhere. Source: none."""
  base = _base(program, params)
  base, teacher = sharding.put((base, teacher), _cut(program, (base, teacher)))
  return state._replace(base=base, teacher=teacher)


def weights(program: Program, state: TrainState) -> Any:
  """What `generate` samples with, for evaluation: what is trained, or base and adapter. Source: none."""
  if state.base is None:
    return state.params
  shardings = jax.tree.map(lambda x: x.sharding, abstract_weights(program))
  return jax.jit(_sampled(program), out_shardings=shardings)(state.base, state.params)


def abstract_weights(program: Program) -> Any:
  """The shapes and shardings of `weights`. Source: none."""
  state = abstract_state(program)
  if state.base is None:
    return state.params
  shapes = jax.eval_shape(_sampled(program), state.base, state.params)
  return _with(shapes, _cut(program, shapes))


def _sampled(program: Program) -> Callable:
  alpha, dtype = program.lora.alpha, program.generate.dtype
  return lambda base, adapter: lora.sampled(base, adapter, alpha, dtype)


def merged(program: Program, state: TrainState) -> Any:
  """One model for others: what is trained, or base and adapter as one, in float32. Source: none."""
  if state.base is None:
    return state.params
  merge = lambda base, adapter: lora.merged(base, adapter, program.lora.alpha)  # noqa: E731
  return jax.jit(merge, out_shardings=_cut(program, state.base))(state.base, state.params)


def _base(program: Program, params: Any) -> Any:
  return lora.frozen(params, program.generate.dtype) if program.lora else None


def _fresh(program: Program, params: Any, teacher: Any, adapter: Any = None) -> TrainState:
  companied, base = auxiliary_model.init(program, params), _base(program, params)
  if program.lora:
    params = lora.init(program.lora, params, program.seed) if adapter is None else adapter
  judging = correctness_head.init(program.features, program.seed) if program.prune else None
  kept = program.method.needs_reference and base is None
  reference = jax.tree.map(jnp.copy, params) if kept else None
  opt_state, zero = program.optimizer.init(params), jnp.int32(0)
  average = jax.tree.map(jnp.copy, params) if program.method.needs_average else None
  outer = program.outer.fresh() if program.outer else None
  noise = program.perturb.fresh(program.model.layers) if program.perturb else None
  handed = (
    carried_kv.empty(program.model, program.generate, program.prompts)
    for _ in range(program.carried)
  )
  return TrainState(
    params,
    opt_state,
    step=zero,
    skipped=zero,
    seed=jnp.int32(program.seed),
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


def _layout(program: Program, shapes: TrainState) -> TrainState:
  placed = _cut(program, shapes._replace(carried=()))
  return placed._replace(carried=sharding.cache_layout(shapes.carried, program.mesh))


def _cut(program: Program, tree: Any) -> Any:
  return sharding.layout(tree, program.mesh, program.rules)


def abstract_state(program: Program) -> TrainState:
  """The shapes and shardings of `init_state`, nothing allocated. Source: none."""
  teacher = decoder.abstract_params(program.teacher) if program.teacher else None
  shapes = jax.eval_shape(
    functools.partial(_fresh, program), decoder.abstract_params(program.model), teacher
  )
  return _with(shapes, _layout(program, shapes))


def _with(shapes: Any, shardings: Any) -> Any:
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
  return jax.tree.map(place, shapes, shardings)


def empty_rollout(program: Program) -> Rollout:
  """No tokens in any row: host arrays. Source: none."""
  B, T = program.prompts * program.generate.rollouts, program.generate.max_tokens
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  return Rollout(
    tokens_BxT=zeros(B, T),
    logp_BxT=np.zeros((B, T), np.float32),
    length_B=zeros(B),
    reason_B=np.zeros(B, np.int8),
    version_BxT=zeros(B, T),
    weight_B=np.ones(B, np.float32),
    feature_BxF=np.zeros((B, program.features), np.float32),
    turns=unsaid(B, T) if program.answered else None,
    expert_BxTxNxk=_unrouted(program, B, T) if program.generate.record_experts else None,
    memory_BxM=np.zeros((B, early_exit.MEMORY_SIZE), np.float32) if _remembers(program) else None,
    noise_BxT=zeros(B, T) if program.keeps_noise else None,
  )


def _remembers(program: Program) -> bool:
  """Whether the exit rule's memory outlives a call: the turns of an environment each begin anew."""
  return program.generate.exit_rule is not early_exit.none and not program.answered


def _unrouted(program: Program, rows: int, T: int) -> np.ndarray:
  told = slot_loop.expert_shape(program.model)
  return np.zeros((rows, T, *told.shape), told.dtype)


def unsaid(rows: int, T: int) -> Turns:
  """Of rows that hold nothing yet: host arrays. Source: none."""
  zeros = lambda kind: np.zeros((rows, T), kind)  # noqa: E731
  return Turns(zeros(np.int32) - 1, zeros(np.float32), zeros(np.int32), np.zeros(rows, np.int8))


def empty_batch(program: Program) -> Batch:
  """A batch of no rollouts, to start with: host arrays. Source: none."""
  P, L, B = program.prompts, program.prompt_tokens, program.prompts * program.group
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  prompts = Prompts(
    tokens_PxL=zeros(P, L),
    length_P=zeros(P),
    index_P=zeros(P),
    born_P=zeros(P),
    expected_P=np.zeros(P, np.float32),
    part_P=zeros(P) if program.parts > 1 else None,
    weight_P=np.ones(P, np.float32) if program.parts > 1 else None,
    context_P=np.full(P, -1, np.int32) if program.contexts else None,
    hint_P=np.zeros(P, np.float32) if program.hints else None,
  )
  spec = program.generate._replace(rollouts=program.group, exit_rule=early_exit.none)
  rollout = empty_rollout(program._replace(generate=spec, keeps_noise=False))
  demo = data.supervised(zeros(P, program.generate.max_tokens), zeros(P))
  return Batch(
    prompts,
    rollout,
    reward_B=np.zeros(B, np.float32),
    correct_B=np.zeros(B, np.float32),
    demo=demo if program.method.needs_demo else None,
    replayed_B=np.zeros(B, np.float32) if program.group > program.generate.rollouts else None,
    parts_BxK=np.zeros((B, len(program.method.weight_K)), np.float32)
    if program.method.needs_parts
    else None,
  )


def compile_step(program: Program) -> Callable:
  """`step` as one jit: (state, batch, prompts, begun, draft, cap), state and batch donated.

  Source: none.
  """
  state = jax.tree.map(lambda x: x.sharding, abstract_state(program))
  rows, whole = sharding.rows(program.mesh), sharding.replicated(program.mesh)
  given = (state, rows, rows, rows, rows, whole)
  run = functools.partial(step, program)
  return _compiled(program, run, given, (state, rows, whole), donated=(0, 1))


def compile_split(program: Program) -> Callable:
  """What `compile_step` returns, as two programs one after the other: they compile faster, and waste the overlap.

  Source: none.
  """
  learn, sample = compile_update(program), compile_sample(program)

  def call(state, batch, *asked):
    state, metrics = learn(state, batch)
    rollout, sampled, left = sample(state._replace(carried=()), state.carried, *asked)
    return state._replace(carried=left), rollout, metrics | sampled

  return call


def compile_sample(program: Program) -> Callable:
  """The sampling half alone: (state without `carried`, carried, prompts, begun, draft, cap), `carried` donated.

  Source: none.
  """
  rows, whole = sharding.rows(program.mesh), sharding.replicated(program.mesh)
  state = jax.tree.map(lambda x: x.sharding, abstract_state(program))

  def sample(state, handed, *asked):
    return generate(program, state._replace(carried=handed), *asked)

  given = (state._replace(carried=()), state.carried, rows, rows, rows, whole)
  return _compiled(program, sample, given, (rows, whole, state.carried), donated=(1,))


def compile_generate(program: Program) -> Callable:
  """`generate` alone, for evaluation: (whole weights, prompts, seed, begun or None) → Rollout. Source: none."""
  params = jax.tree.map(lambda x: x.sharding, abstract_weights(program))
  rows = sharding.rows(program.mesh)

  def run(params, prompts, seed, begun):
    return generate(program, frozen(params, seed=seed), prompts, begun)[0]

  return _compiled(program, run, (params, rows, sharding.replicated(program.mesh), rows), rows)


def compile_trust(program: Program) -> Callable:
  """`trust` alone, for evaluation: (whole weights, judge, prompts, their rollout) → p_B. Source: none."""
  params = jax.tree.map(lambda x: x.sharding, abstract_weights(program))
  rows = sharding.rows(program.mesh)

  def run(params, judging, prompts, rollout):
    return trust(program, frozen(params)._replace(judge=judging), prompts, rollout)

  return _compiled(program, run, (params, sharding.replicated(program.mesh), rows, rows), rows)


def frozen(params: Any, version: int = 0, seed: jax.Array | int = 0) -> TrainState:
  """Weights to sample with and not to learn with. Source: none."""
  return TrainState(params, (), jnp.int32(version), jnp.int32(0), jnp.int32(seed))


def compile_update(program: Program) -> Callable:
  """`update` alone, for a supervised warm start: (state, batch), both donated. Source: none."""
  state = jax.tree.map(lambda x: x.sharding, abstract_state(program))
  rows, whole = sharding.rows(program.mesh), sharding.replicated(program.mesh)
  run = functools.partial(update, program)
  return _compiled(program, run, (state, rows), (state, whole), donated=(0, 1))


def _compiled(
  program: Program, run: Callable, given: tuple, returned: Any, donated: tuple[int, ...] = ()
) -> Callable:
  """`run` as a jit for the mesh, from shardings `given` to those `returned`.

  Of several processes jit takes arrays of the whole mesh alone, and what comes from the host is not.
  """
  compiled = jax.jit(
    run,
    donate_argnums=donated,
    in_shardings=given,
    out_shardings=returned,
    compiler_options=hardware.compiler_options(program.mesh.devices.flat[0]),
  )
  if jax.process_count() == 1:
    return compiled
  return lambda *args: compiled(*sharding.put(args, given))
