"""M2PO: the policy loss of its own repository, with the numbers of its scripts and two larger budgets."""

from __future__ import annotations

from jaxrl_llm.objective import clip_masks, trust_region
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(
  'Infini-AI-Lab/M2PO',
  'af54a3e8feffb7a66a8258003aebefa37759cec0',
  (verl_core.CORE, verl_core.FUNCTIONAL),
  'Apache-2.0',
)
BUDGETS = (
  0.04,
  0.2,
  0.4,
)  # the scripts' own, with which the narrowest bounds bind, and two that bind themselves
SEEDS = (0, 1, 2)


def settings(budget):
  return dict(
    trust_region=dict(fn='second_moment_clip', budget=float(budget), low=0.3, high=0.5),
    aggregation='token_mean',
  )


SETTINGS = settings(0.04)
MUTANTS = {
  'bounds never tighter': (trust_region, 'floor, roof) | (square', 'floor, 1 / floor) | (square'),
  'no sign': (
    clip_masks,
    'moved_on = beyond(log_ratio > 0, log_ratio < 0',
    'moved_on = beyond(log_ratio < 9, log_ratio < 9',
  ),
  'the token at the bound': (trust_region, '(square < level)', '(square <= level)'),
  'first moment': (clip_masks, 'return log_ratio**2, moved', 'return jnp.abs(log_ratio), moved'),
}


def draw(seed):
  return lib.draw(seed) | dict(budget=BUDGETS[seed])


def ours(data):
  return lib.gradient(settings(data['budget']), data)


def official(torch, read, data):
  x = lib.tensors(torch, data)
  names = (
    '_solve_tau_from_sorted_delta2', '_get_trust_region_tokens_delta_sq', 'kpo_clip_harmful_tokens',
    'get_ratio_stats', 'compute_m2po_policy_loss', 'agg_loss', 'compute_grpo_outcome_advantage',
  )  # fmt: skip
  core = verl_core.core(torch, read, *names)
  loss, *_ = core.compute_m2po_policy_loss(
    x.old, x.logp, verl_core.grpo(core, x), x.mask, data['budget'], 0.3, 0.5, 'token-mean'
  )
  return lib.outputs(x, loss, verl_core.without_epsilon(x, 'token-mean'))


lib.main(__name__)
