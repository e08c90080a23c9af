"""ECHO: advantages by entropy and confidence, and PPO's clip with a bound for each row, with its GRPO.

Confidence is the mean of the five largest probabilities, as in the paper and in the official forward pass with
padding. Without padding, as in the official scripts, that code replaces it by the probability of the sampled token.
The bound of the dual clip, 3 there, is out of reach here. Entropy and confidence are of one policy here: the official
ones are of the policy before the batch, ours of the current one. The official means have 1e-8 in their denominators,
which is taken out. Trees, votes and the KL penalty are not covered.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.models import logprob
from jaxrl_llm.objective import advantage_modulation, trust_region
from tests.objective.official import lib, verl_core

CORE, FUNCTIONAL = f'verl/{verl_core.CORE}', f'verl/{verl_core.FUNCTIONAL}'
ACTOR = 'verl/verl/workers/actor/dp_actor.py'
OFFICIAL = lib.Official(
  'user683/ECHO',
  '6f7b311bdaa407322fbcd141881a0b1d90c35afe',
  (CORE, FUNCTIONAL, ACTOR),
  'Apache-2.0',
)
V, TAIL = 8, 3  # tokens; the official tail of 16 for rows of 6
ADD = dict(gradient=0.0, gradient_add=0.3)  # output → add_coeff: the official default, and another
NUMBERS = dict(  # of the official ppo_trainer.yaml
  **dict(enable=True, alpha=1.0, beta=1.0, s_max=2.0, mult_coeff=0.1),
  **dict(tail_window=TAIL, eps_min=0.05, eps_max=0.2, kappa=4.0, use_adaptive_clip=True),
)
SEEDS = (0, 1)
MUTANTS = {
  'confidence as it is': (
    advantage_modulation,
    'standard(1 - present(tokens.confidence_BxT))',
    'standard(present(tokens.confidence_BxT))',
  ),
  'no entropy': (
    advantage_modulation,
    'score = standard(present(tokens.entropy_BxT)) +',
    'score =',
  ),
  'biased variance': (advantage_modulation, 'jnp.maximum(n - 1, 1) + eps', 'n + eps'),
  'no bound on the score': (advantage_modulation, 'jnp.clip(score, -most, most)', 'score'),
  'less of it': (advantage_modulation, '(1 + multiply * score)', '(1 + multiply * score / 2)'),
  'score of the batch': (advantage_modulation, 'add * (score - mean_B[:, None])', 'add * score'),
  'mean of all tokens': (trust_region, 'place > length_Bx1 - tail', 'place > 0'),
  'wider where sure': (
    trust_region,
    'jax.nn.sigmoid(slope * (1 - confidence))',
    'jax.nn.sigmoid(slope * confidence)',
  ),
  'lower bound': (
    trust_region,
    'tokens.advantage_BxT, 1 - eps, 1 + eps)',
    'tokens.advantage_BxT, 0 * eps, 1 + eps)',
  ),
  'upper bound': (
    trust_region,
    'tokens.advantage_BxT, 1 - eps, 1 + eps)',
    'tokens.advantage_BxT, 1 - eps, 2 + eps)',
  ),
  'the largest': (logprob, 'min(top, logits_BxCxV.shape[-1])', '1'),
}


def draw(seed: int) -> dict[str, np.ndarray]:
  """`lib.draw` with logits of V tokens; ratios of two tokens of long rows are close to their bounds."""
  data, r = lib.draw(seed), np.random.default_rng((seed, 3))
  scale_Bx1x1 = r.uniform(0.2, 4, (lib.B, 1, 1))
  data['logits'] = np.round(scale_Bx1x1 * r.normal(size=(lib.B, lib.T, V)), 4)
  _, confidence_BxT = statistics(data)
  for b, length in enumerate(data['length']):
    confidence = confidence_BxT[b, max(length - TAIL, 0) : length].mean() if length else 0.0
    epsilon = 0.05 + 0.15 / (1 + np.exp(-4 * (1 - confidence)))
    for t, sign in ((length - 1, 1), (length - 2, -1)):
      if length > TAIL:
        ratio = 1 + sign * epsilon + r.choice([-1e-5, 1e-5])
        data['old'][b, t] = data['logp'][b, t] - np.log(ratio)
  return {
    name: data[name] for name in ('logp', 'old', 'logits', 'length', 'age', 'correct', 'reward')
  }


def official(torch, read, data):
  text = read(FUNCTIONAL).replace('mask.sum(axis=axis) + 1e-8', 'mask.sum(axis=axis)')
  means = lib.functions(text, (*verl_core.MEANS, 'entropy_from_logits'), torch=torch)
  names = ('_cfg_get', '_compute_tail_confidence', '_broadcast_group_mean', 'agg_loss')
  steps = 'compute_grpo_outcome_advantage', 'apply_hybrid_advantage_shaping', 'compute_policy_loss'
  core = lib.functions(
    read(CORE),
    (*names, *steps),
    torch=torch,
    verl_F=means,
    defaultdict=verl_core.collections.defaultdict,
  )
  confidence = lib.method(
    read(ACTOR), 'DataParallelPPOActor', '_compute_topk_confidence', torch=torch
  )
  bounds = lib.branch(read(ACTOR), "'clip_epsilon' in data")
  found = {}
  for name, add in ADD.items():
    x = lib.tensors(torch, data)
    rows = dict(
      response_mask=x.mask,
      entropys=means.entropy_from_logits(x.logits),
      confidences=confidence(None, x.logits, 5),
      advantages=core.compute_grpo_outcome_advantage(verl_core.at_the_end(x), x.mask, x.uid)[0],
    )
    batch = types.SimpleNamespace(batch=rows, non_tensor_batch=dict(uid=x.uid))
    core.apply_hybrid_advantage_shaping(batch, dict(hybrid_adv=NUMBERS | dict(add_coeff=add)))
    space: dict[str, Any] = dict(data=rows, response_mask=x.mask, log_prob=x.logp)
    exec(bounds, space)
    loss, *_ = core.compute_policy_loss(
      x.old,
      x.logp,
      rows['advantages'],
      x.mask,
      cliprange=0.2,
      clip_ratio_c=1e9,
      **{side: space[side] for side in ('cliprange_tensor_low', 'cliprange_tensor_high')},
    )
    found[name] = lib.outputs(x, loss)['gradient']
  return found


def statistics(data: dict) -> tuple[Any, Any]:
  """Entropy and confidence [B, T] of the project's head."""
  total_BxT, entropy_BxT = logprob.partition_and_entropy(data['logits'])
  (confidence_BxT,) = logprob._statistics(
    data['logits'], total_BxT, objective.CONFIDENCE_TOP_K, collision=False
  )
  return entropy_BxT, confidence_BxT


def ours(data):
  found = {}
  for name, add in ADD.items():
    method = objective.method(
      lib.settings(
        dict(
          advantage_modulation=dict(fn='unsure', multiply=0.1, add=add, most=2.0),
          trust_region=dict(fn='confidence_clip', base=0.05, gain=0.15, slope=4.0, tail=TAIL),
          aggregation='token_mean',
        )
      )
    )
    target = objective.targets(method, lib.batch(data, method.needs_old), lib.G)
    c_BxT, _ = objective.coefficients(method, target, data['logp'], *statistics(data))
    found[name] = -np.asarray(c_BxT)
  return found


lib.main(__name__)
