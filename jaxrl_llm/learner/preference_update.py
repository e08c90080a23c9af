"""The update of a reward model on pairs: the Bradley–Terry loss of a decoder's scalar head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.config.schema import Config
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.optimizer import Schedule, make_optimizer
from jaxrl_llm.learner.precision import compute_dtype
from jaxrl_llm.learner.rollout_from_config import on_cpu
from jaxrl_llm.learner.spec_from_config import microbatch_tokens
from jaxrl_llm.models import decoder, reward_model
from jaxrl_llm.types import Array, Metrics, ModelConfig, Params

_SUMS = tuple(f'reward_model/{name}' for name in ('loss', 'accuracy', 'margin', 'mean_reward'))


class Pairs(NamedTuple):
  """N pairs of token rows: index 0 of the second axis is the preferred one."""

  tokens_Nx2xS: Array  # padded on the right
  length_Nx2: Array
  margin_N: Array  # least difference of the scores


class Layout(NamedTuple):
  """Devices and sharding."""

  mesh: Mesh
  rules: sharding.Rules


class PairSpec(NamedTuple):
  """All that is fixed while a reward model is trained."""

  model: ModelConfig
  optimizer: optax.GradientTransformation
  schedule: Schedule
  center_coef: float  # of (r₀ + r₁)²
  dtype: str  # of compute
  remat: bool
  microbatch_tokens: int  # of a gradient-accumulation pass on a device
  layout: Layout


class State(NamedTuple):
  """A reward model and its optimizer."""

  params: Params  # {'decoder': …, 'score': {'kernel': [D]}}
  opt_state: optax.OptState
  skipped: Array  # steps in a row whose gradient was not finite


def make_spec(config: Config, model: ModelConfig, mesh: Mesh) -> PairSpec:
  """The specification of `config`. Raises UserError as `make_optimizer`."""
  remat, cpu = config.learner.remat, on_cpu(mesh)
  optimizer, schedule = make_optimizer(config.optimizer, config.steps, seed=config.seed)
  return PairSpec(
    model=model,
    optimizer=optimizer,
    schedule=schedule,
    center_coef=config.reward_model.center_rewards_coefficient,
    dtype=compute_dtype(config, cpu),
    remat=remat if isinstance(remat, bool) else not cpu,
    microbatch_tokens=microbatch_tokens(config, mesh),
    layout=Layout(mesh, sharding.rules(config.mesh.rules)),
  )


def pair_loss(score_Nx2: Array, margin_N: Array, center_coef: float) -> jax.Array:
  """−log σ(r₀ − r₁ − margin) + c·(r₀ + r₁)² for each pair. arXiv:2203.02155, arXiv:2312.09244 (c)."""
  chosen_N, rejected_N = score_Nx2[:, 0], score_Nx2[:, 1]
  likelihood_N = jax.nn.log_sigmoid(chosen_N - rejected_N - margin_N)
  return center_coef * (chosen_N + rejected_N) ** 2 - likelihood_N


def init_state(spec: PairSpec, params: Params, seed: int) -> State:
  """A decoder's weights on the mesh, and a new head drawn from N(0, 0.02²), as transformers does."""
  head_D = 0.02 * jax.random.normal(jax.random.key(seed), (spec.model.width,))
  weights = dict(decoder=params, score=dict(kernel=head_D))
  weights = sharding.put(weights, _shardings(spec, weights))
  make = functools.partial(_first_state, spec)
  return jax.jit(make, out_shardings=_state_shardings(spec))(weights)


def abstract_state(spec: PairSpec) -> State:
  """Shapes and shardings of `init_state`; nothing is allocated."""
  head_D = jax.ShapeDtypeStruct((spec.model.width,), jnp.float32)
  weights = dict(decoder=decoder.abstract_params(spec.model), score=dict(kernel=head_D))
  shapes = jax.eval_shape(functools.partial(_first_state, spec), weights)
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
  return jax.tree.map(place, shapes, _shardings(spec, shapes))


def compile_update(spec: PairSpec) -> Callable[[State, Pairs], tuple[State, Metrics]]:
  """One optimizer step on the mean loss of the pairs; the state is donated.

  A gradient that is not finite changes `skipped` alone.
  """
  state, everywhere = _state_shardings(spec), sharding.replicated(spec.layout.mesh)
  return jax.jit(
    functools.partial(_update, spec),
    in_shardings=(state, everywhere),
    out_shardings=(state, everywhere),
    donate_argnums=0,
  )


def compile_scores(spec: PairSpec) -> Callable[[Params, Pairs], jax.Array]:
  """The scores [N, 2] of pairs."""
  params, everywhere = _state_shardings(spec).params, sharding.replicated(spec.layout.mesh)
  return jax.jit(
    functools.partial(_all_scores, spec),
    in_shardings=(params, everywhere),
    out_shardings=everywhere,
  )


def _first_state(spec: PairSpec, weights: Params) -> State:
  params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), weights)
  return State(params, spec.optimizer.init(params), jnp.int32(0))


@sharding.on_mesh
def _update(spec: PairSpec, state: State, pairs: Pairs) -> tuple[State, Metrics]:
  count, layout = len(pairs.margin_N), spec.layout

  def loss(params: Params, part: Pairs) -> tuple[jax.Array, Metrics]:
    score_Cx2 = _scores(spec, params, part)
    total = pair_loss(score_Cx2, part.margin_N, spec.center_coef).sum() / count
    gap_C = score_Cx2[:, 0] - score_Cx2[:, 1]
    sums = total, (gap_C > 0).sum() / count, gap_C.sum() / count, score_Cx2.sum() / (2 * count)
    return total, dict(zip(_SUMS, sums, strict=True))

  def add(total: tuple[Params, Metrics], part: Pairs) -> tuple[tuple[Params, Metrics], None]:
    grads, sums = jax.grad(loss, has_aux=True)(state.params, part)
    part_total = sharding.keep_layout(grads, layout.mesh, layout.rules), sums
    return jax.tree.map(jnp.add, total, part_total), None

  start = jax.tree.map(jnp.zeros_like, state.params), {k: jnp.float32(0) for k in _SUMS}
  (grads, metrics), _ = jax.lax.scan(add, start, _microbatches(spec, pairs))
  norm = optax.tree.norm(grads)
  updates, opt_state = spec.optimizer.update(grads, state.opt_state, state.params)
  trained = State(optax.apply_updates(state.params, updates), opt_state, jnp.int32(0))
  state = jax.tree.map(
    lambda new, old: jnp.where(jnp.isfinite(norm), new, old),
    trained,
    state._replace(skipped=state.skipped + 1),
  )
  return state, metrics | {'actor/grad_norm': norm, 'actor/skipped_updates': state.skipped}


@sharding.on_mesh
def _all_scores(spec: PairSpec, params: Params, pairs: Pairs) -> jax.Array:
  parts = _microbatches(spec, pairs)
  return jax.lax.map(functools.partial(_scores, spec, params), parts).reshape(-1, 2)


def _scores(spec: PairSpec, params: Params, part: Pairs) -> jax.Array:
  """The scores [C, 2] of one microbatch."""
  C, _, S = part.tokens_Nx2xS.shape
  score_B = reward_model.scores(
    spec.model,
    params['decoder'],
    params['score']['kernel'],
    part.tokens_Nx2xS.reshape(2 * C, S),
    part.length_Nx2.reshape(2 * C),
    dtype=spec.dtype,
    remat=spec.remat,
    gather=sharding.layer_gather(spec.layout.mesh, spec.layout.rules),
  )
  return score_B.reshape(C, 2)


def _microbatches(spec: PairSpec, pairs: Pairs) -> Pairs:
  """The pairs as [M, C, …] with C the largest divisor of N that microbatch_tokens and the row shards allow."""
  N, _, S = pairs.tokens_Nx2xS.shape
  shards = sharding.rows_shards(spec.layout.mesh, sharding.UPDATE_ROWS)
  room = max(spec.microbatch_tokens // (2 * S), 1) * shards
  sizes = (c for c in range(1, N + 1) if N % c == 0 and (c <= room or c == 1))
  C = max(sizes, key=lambda c: (c % shards == 0, c))
  return jax.tree.map(lambda x: x.reshape(N // C, C, *x.shape[1:]), pairs)


def _shardings(spec: PairSpec, tree: Params) -> Params:
  return sharding.layout(tree, spec.layout.mesh, spec.layout.rules)


def _state_shardings(spec: PairSpec) -> State:
  return jax.tree.map(lambda x: x.sharding, abstract_state(spec))
