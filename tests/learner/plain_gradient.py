"""The gradient of a minibatch by definition: plain forward passes over whole rows, and −Σ c·log π of all of them.

Nothing is packed, left out or accumulated. The update is asked for its own gradient by an optimizer that records it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import objective
from jaxrl_llm.learner import leverage, microbatch, minibatch
from jaxrl_llm.learner.step_spec import demonstration_spec, teacher_spec
from jaxrl_llm.models import decoder, logprob

# Its state is the last gradient; weights stay as they are.
RECORDER = optax.GradientTransformation(
  lambda params: jax.tree.map(jnp.zeros_like, params),
  lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)


class Scores(NamedTuple):
  """Of tokens [B, T]."""

  logp: jax.Array
  entropy: jax.Array
  confidence: jax.Array
  collision: jax.Array


def recording(spec, size):
  """The spec with RECORDER for its optimizer, and with microbatches of another size."""
  return spec._replace(update=spec.update._replace(optimizer=RECORDER, packing=size))


def whole_rows(spec, batch):
  """Each prompt with one of its completions: tokens [B, L + T], their number [B], and identities [B, L + T].

  Identities number the tokens of prompts, and after these the tokens of completions.
  """
  (P, L), (B, T) = batch.prompts.tokens_PxL.shape, batch.rollout.tokens_BxT.shape
  prompt_B = jnp.arange(B) * P // B
  start_Bx1 = jnp.asarray(batch.prompts.length_P)[prompt_B][:, None]
  column = jnp.arange(L + T)[None]
  place = jnp.maximum(column - start_Bx1, 0)
  own = jnp.take_along_axis(jnp.asarray(batch.rollout.tokens_BxT), place % T, axis=1)
  asked = jnp.pad(jnp.asarray(batch.prompts.tokens_PxL), ((0, 0), (0, T)))[prompt_B]
  tokens = jnp.where(column < start_Bx1, asked, own)
  in_prompt = prompt_B[:, None] * L + column
  in_row = P * L + jnp.arange(B)[:, None] * T + place
  return tokens, start_Bx1, jnp.where(column < start_Bx1, in_prompt, in_row)


def hidden_states(spec, weights, batch, noise=None):
  """The hidden states [B, T, D] that predict the tokens of completions, a whole row after the other."""
  tokens, start_Bx1, identity = whole_rows(spec, batch)
  T = batch.rollout.tokens_BxT.shape[1]
  column = jnp.arange(tokens.shape[1])[None]
  end_Bx1 = start_Bx1 + jnp.asarray(batch.rollout.length_B)[:, None]
  expert, of_rows = batch.rollout.expert_BxTxNxk, None
  if expert is not None:
    place = jnp.clip(column - start_Bx1, 0, T - 1)[..., None, None]
    of_rows = jnp.take_along_axis(jnp.asarray(expert).astype(jnp.int32), place, axis=1)
    of_rows = jnp.where((column < start_Bx1)[..., None, None], -1, of_rows)
  hidden, *_ = decoder.apply(
    spec.model.config,
    weights,
    tokens,
    jnp.broadcast_to(column, tokens.shape),
    decoder.causal(column < end_Bx1),
    dtype=spec.model.dtype,
    noise=None if noise is None else decoder.Noise(*noise, identity),
    expert_BxQxNxk=of_rows,
  )
  before = jnp.clip(start_Bx1 - 1 + jnp.arange(T)[None], 0, tokens.shape[1] - 1)
  return jnp.take_along_axis(hidden, before[..., None], axis=1)


def distributions(spec, weights, batch, noise=None):
  """Log-probabilities [B, T, V] of all tokens of the vocabulary."""
  hidden = hidden_states(spec, weights, batch, noise)
  logits = decoder.head(spec.model.config, weights, hidden, spec.model.dtype)
  return jax.nn.log_softmax(logits / spec.rollout.decode.temperature)


def scores(spec, weights, batch, noise=None, entropy_gradient=False):
  """Log-probabilities, entropies and confidences of all completions."""
  found = logprob.token_logp(
    spec.model.config,
    weights,
    hidden_states(spec, weights, batch, noise),
    jnp.asarray(batch.rollout.tokens_BxT),
    temperature=spec.rollout.decode.temperature,
    chunk_tokens=10**6,
    dtype=spec.model.dtype,
    top=objective.CONFIDENCE_TOP_K,
    entropy_gradient=entropy_gradient,
    collision=True,
  )
  return Scores(*found)


def weights_of(spec, state, params):
  return microbatch.policy_weights(spec, state.base, params)


def minus_sum(c_BxT, logp_BxT):
  return -jnp.where(c_BxT == 0, 0.0, c_BxT * logp_BxT).sum()


def targets(spec, state, batch, scored, inputs):
  """Targets with all that the method needs; `scored` are those of the present weights."""
  method, group = spec.objective.method, spec.layout.group
  leverage_B = None
  if method.needs_norms:
    leverage_B = leverage.row_leverage(spec, state.params, batch, state.base)
  shape = batch.rollout.tokens_BxT.shape
  free = batch._replace(rollout=batch.rollout._replace(expert_BxTxNxk=None))
  arrays, policies = {}, objective.OtherPolicies()
  if 'reward_reference' in method.needs:
    reference = scores(spec, microbatch.reference_weights(state), free).logp
    policies = policies._replace(reference_BxT=reference)
  target = objective.targets(
    method, batch, group, inputs.signal, leverage_B, spec.layout.slots_per_prompt, policies
  )
  if method.needs_old:
    arrays['old_BxT'] = scored.logp
  if method.needs_average:
    arrays['old_BxT'] = scores(spec, weights_of(spec, state, state.average), batch).logp
  if 'reference' in method.needs:
    reference = microbatch.reference_weights(state)
    arrays['reference_BxT'] = scores(spec, reference, free).logp
  if method.needs_versions:
    arrays['age_BxT'] = state.step - batch.rollout.version_BxT
    arrays['batch_steps_BxT'] = jnp.broadcast_to(state.step - inputs.began, shape)
  if method.needs_step:
    arrays['step_B'] = jnp.broadcast_to(state.step, shape[:1])
  target = target.with_arrays(**arrays)
  if method.needs_spans:
    return _with_spans(spec, state, free, target)
  if method.needs_teacher:
    taught = scores(teacher_spec(spec), state.teacher, free).logp
    target = objective.distill(method, target.with_arrays(teacher_BxT=taught))
  if method.needs_solution:
    tokens_BxL, length_B = batch.solutions
    solved = free._replace(prompts=batch.prompts._replace(tokens_PxL=tokens_BxL, length_P=length_B))
    taught = scores(spec, microbatch.reference_weights(state), solved).logp
    target = objective.distill(method, target.with_arrays(teacher_BxT=taught))
  return target


def _with_spans(spec, state, batch, target):
  """Targets whose advantages are sums over spans, by matrices of which token is in which span."""
  tokens = batch.teacher_tokens
  prompts = batch.prompts._replace(tokens_PxL=tokens.prompt_BxL, length_P=tokens.prompt_length_B)
  rows = batch.rollout._replace(tokens_BxT=tokens.tokens_BxE, length_B=tokens.length_B)
  read = batch._replace(prompts=prompts, rollout=rows)
  logp_BxE = scores(teacher_spec(spec), state.teacher, read).logp
  spans = jnp.arange(tokens.own_span_BxT.shape[1])[None, None]
  ours, theirs = (x[..., None] == spans for x in (tokens.own_span_BxT, tokens.span_BxE))
  old_BxT = target.policies.old_BxT
  old_BxT = batch.rollout.logp_BxT if old_BxT is None else old_BxT
  total = lambda x, member: jnp.where(member, x[..., None], 0.0).sum(1)  # noqa: E731
  gap_BxK = total(logp_BxE, theirs) - total(old_BxT, ours)
  advantage_BxT = jnp.where(ours, gap_BxK[:, None], 0.0).sum(2)
  return target._replace(advantage_BxT=advantage_BxT)


def gradient(spec, state, batch, signal=None, noise=None):
  """(gradient of the loss, coefficients, sums, targets) of a minibatch whose old policy is the present one."""
  inputs = minibatch.MinibatchInputs(state.step, signal=signal)
  scored = scores(spec, weights_of(spec, state, state.params), batch, noise)
  target = targets(spec, state, batch, scored, inputs)
  method, planned = spec.objective.method, None
  if method.needs_demo:
    target, *planned = objective.plan_demonstrations(
      method, target, batch, spec.layout.group, state.step
    )
  bonus, term = spec.objective.entropy_bonus, spec.objective.divergence
  if term is not None:
    target = target._replace(advantage_BxT=term.reward_weight * target.advantage_BxT)
  c_BxT, sums = objective.coefficients(method, target, *scored)

  def loss(params):
    weights = weights_of(spec, state, params)
    found = scores(spec, weights, batch, noise, bonus is not None)
    value = minus_sum(c_BxT, found.logp)
    if bonus is not None:
      value += minus_sum(bonus.coefficient(state.entropy_bonus) * target.weight_BxT, found.entropy)
    if term is not None:
      value += _divergence(spec, state, batch, weights, target, noise)
    if spec.objective.score_centering is not None:
      value += _mean_score(spec, batch, weights, target)
    if planned is not None:
      value += _demonstration_loss(spec, state, batch, weights, *planned[:2])
    return value

  return jax.grad(loss)(state.params), c_BxT, sums, target


def _divergence(spec, state, batch, weights, target, noise):
  free = batch._replace(rollout=batch.rollout._replace(expert_BxTxNxk=None))
  theirs = distributions(teacher_spec(spec), state.teacher, free)
  ours = distributions(spec, weights, batch, noise)
  theirs = jax.nn.log_softmax(theirs[..., : ours.shape[-1]])
  value_BxT = spec.objective.divergence.between(ours, theirs)
  return -minus_sum(target.weight_BxT, value_BxT)


def _mean_score(spec, batch, weights, target):
  """W·A over all tokens that were recorded and a tail, for importance weights of 1 or min(v, most)."""
  trust = spec.objective.method.token_stages.trust_region
  most = trust.keywords.get('most', np.inf)
  is_one = spec.objective.method.token_stages.ratio.func.__name__ == 'one'
  weigh = jnp.ones_like if is_one else lambda v: jnp.minimum(v, most)
  p_BxTxV = jnp.exp(distributions(spec, weights, batch))
  member_BxTxV = jax.nn.one_hot(batch.rollout.top_id_BxTxK, p_BxTxV.shape[-1])
  q_BxTxV = (jnp.exp(batch.rollout.top_logp_BxTxK)[..., None] * member_BxTxV).sum(2)
  in_head = member_BxTxV.sum(2) > 0
  rest = lambda x: 1 - jnp.where(in_head, x, 0).sum(-1, keepdims=True)  # noqa: E731
  q_BxTxV = jnp.where(in_head, q_BxTxV, rest(q_BxTxV) / rest(p_BxTxV) * p_BxTxV)
  c_BxTxV = jax.lax.stop_gradient(q_BxTxV * weigh(p_BxTxV / q_BxTxV))
  scores_BxT = (c_BxTxV * jnp.log(p_BxTxV)).sum(-1)
  return -minus_sum(target.weight_BxT * target.advantage_BxT, scores_BxT)


def _demonstration_loss(spec, state, batch, weights, terms, token_weight):
  single, rows = demonstration_spec(spec), batch._replace(rollout=batch.demo)
  if 'demo_reference' in spec.objective.method.needs:
    known = scores(single, microbatch.reference_weights(state), rows).logp
    terms = objective.fill_behavior(terms, known)
  logp_PxT = scores(single, weights, rows).logp
  return minus_sum(objective.demonstration_coefficients(token_weight, terms, logp_PxT), logp_PxT)


def distance(got, want):
  """‖got − want‖ / ‖want‖ over all arrays."""
  norm = lambda tree: np.sqrt(sum((np.float64(x) ** 2).sum() for x in jax.tree.leaves(tree)))  # noqa: E731
  gap = jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), got, want)
  assert norm(want) > 0
  return norm(gap) / norm(want)
