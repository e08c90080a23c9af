"""Score centering by vime's code: alone, with truncated and masked importance weights, and over the whole vocabulary."""

from __future__ import annotations

import math
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import score_centering
from tests.objective.official import entropy_core, lib

LOSS = 'vime/backends/megatron_utils/loss.py'
TERM, WEIGHTS = 'vime/utils/score_centering.py', 'vime/utils/ppo_utils.py'
OFFICIAL = lib.Official(
  'vllm-project/vime',
  '2b83ea209634051243693e8186f45f449acb4cd1',
  (LOSS, TERM, WEIGHTS),
  'none stated',
)
SETTINGS = dict(
  advantage='group_centered', ratio='one', trust_region='none', aggregation='token_mean'
)
LOW, HIGH, K = 0.5, 2.0, 3
MASKED = dict(fn='two_side', low=1 - LOW, high=HIGH - 1)
# Output → (stages, official function of importance weights and its lower bound, recorded tokens).
MODES = {
  'plain': (dict(), None, 0.0, K),
  'truncated': (
    dict(ratio='direct', trust_region=dict(fn='cap', most=HIGH)),
    'vanilla_tis_function',
    0.0,
    K,
  ),
  'masked': (dict(ratio='direct', trust_region=MASKED), 'icepop_function', LOW, K),
  'whole': (dict(), None, 0.0, entropy_core.V),
}
MUTANTS = {
  'sign': (score_centering, 'weighted[..., :-1] - alpha', 'weighted[..., :-1] + alpha'),
  'no tail': (score_centering, 'alpha_BxTx1 = weighted', 'alpha_BxTx1 = 0 * weighted'),
  'not weighted': (
    score_centering,
    '* _weight(stages, policy, sampler, advantage_BxT)',
    '',
  ),
  'a tail of weight 1': (
    score_centering,
    'weighted[..., -1:] / jnp.exp(policy[..., -1:])',
    'jnp.exp(sampler[..., -1:] - policy[..., -1:])',
  ),
  'a larger floor': (score_centering, 'LEAST_TAIL)', '0.1)'),
  'no advantage': (score_centering, 'return advantage_BxT * (', 'return ('),
}


def draw(seed: int) -> dict[str, np.ndarray]:
  """`entropy_core.draw` with the logits of a sampler, whose log-probs are those of the old policy."""
  data, r = entropy_core.draw(seed), np.random.default_rng((seed, 9))
  sampler = np.round(data['logits'] + 1.2 * r.normal(size=data['logits'].shape), 4)
  logp = sampler - np.log(np.exp(sampler).sum(-1, keepdims=True))
  old = np.take_along_axis(logp, data['token'][..., None], -1)[..., 0]
  return data | dict(sampler=sampler, old=old)


def official(torch, read, data):
  return {name: _gradient(torch, read, data, *mode[1:]) for name, mode in MODES.items()}


def _gradient(torch, read, data, weigh, low, count):
  weights = lib.functions(read(WEIGHTS), ('importance_weights',), torch=torch).importance_weights
  # It computes probabilities in float32 alone.
  text, space = read(TERM).replace('.float()', '.double()'), dict(importance_weights=weights)
  names = 'get_score_centering_is_config', 'score_centering_correction'
  code = lib.functions(text, names, torch=torch, math=math, **space)
  x = entropy_core.tensors(torch, data)
  args = types.SimpleNamespace(use_tis=weigh is not None, tis_clip_low=low, tis_clip=HIGH)
  args.custom_tis_function_path = weigh and f'vime.backends.megatron_utils.loss.{weigh}'
  sampler, ids = torch.topk(torch.log_softmax(x.sampler, -1), count, dim=-1)
  head = torch.gather(torch.log_softmax(x.logits, -1), -1, ids)
  real, batch = x.mask > 0, dict(rollout_log_probs=[x.old])

  def terms(args, *_):
    found = code.score_centering_correction(
      head, sampler, **code.get_score_centering_is_config(args)
    )
    return dict(sc_correction=found[0])

  mean = torch.stack([x.reward[x.uid == u].mean() for u in x.uid])
  advantages = (x.reward - mean)[:, None] * x.mask
  loss = -advantages * x.logp
  if weigh is not None:
    used = lib.functions(read(LOSS), (weigh,), torch=torch, Any=typing.Any, **space)
    loss, *_ = getattr(used, weigh)(
      args,
      pg_loss=loss,
      train_log_probs=[x.logp.detach()],
      rollout_log_probs=batch['rollout_log_probs'],
      loss_masks=[x.mask],
    )
  values = dict(pg_loss=loss, advantages=advantages, log_probs=x.logp, logits=x.logits)
  values |= dict(args=args, batch=batch, torch=torch, get_score_centering_terms=terms, **space)
  values |= dict(get_score_centering_is_config=code.get_score_centering_is_config)
  exec(lib.branch(read(LOSS), 'use_score_centering'), values)
  return entropy_core.outputs(x, values['pg_loss'][real].mean())['gradient']


def ours(data):
  return {name: gradient(data, *mode) for name, mode in MODES.items()}


def gradient(data, changes, _, __, count):
  """Gradient of the project's loss with respect to the logits."""
  method = objective.method(lib.settings(SETTINGS | changes))
  target = objective.targets(method, lib.batch(data, needs_old=False), lib.G)
  c_BxT, _ = objective.coefficients(method, target, data['logp'], data['entropy'])
  sampler, ids = jax.lax.top_k(jax.nn.log_softmax(jnp.asarray(data['sampler'])), count)

  def loss(logits_BxTxV):
    logp = jax.nn.log_softmax(logits_BxTxV)
    drawn = jnp.take_along_axis(logp, data['token'][..., None], -1)[..., 0]
    term = score_centering.mean_score(method.token_stages, logp, ids, sampler, target.advantage_BxT)
    return (target.weight_BxT * term - c_BxT * drawn).sum()

  return np.asarray(jax.grad(loss)(jnp.asarray(data['logits'])))


lib.main(__name__)
