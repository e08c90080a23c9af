"""CLPO, arXiv:2509.25004: the policy rewrites hard and medium prompts, and hard ones have half the KL term.

python -m jaxrl_llm.main --config=clpo
Numbers: 4 rollouts, limits 0.3 and 0.7, KL 0.001 and half of it for hard prompts, and dual clip 3 are those of the
official script. There a prompt is rewritten and sampled again in the same step; here in the next two. The instructions,
the batch (64 prompts in minibatches of 8 there) and the learning rate (1e-6 there) are ours, for a 135M model on a
laptop.
"""


def get_config():
  return dict(
    base='sums',
    prompts=8,
    rollouts=4,
    prompt_tokens=192,
    completion_tokens=96,
    curriculum=dict(
      hint=dict(fn='rewritten', hard=0.3, medium=0.7),
      candidates=dict(fn='stream', multiple=1),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      utility=dict(fn='uniform'),
      eligibility=dict(fn='none'),
    ),
    learner=dict(minibatches=2),
    objective=dict(
      trust_region=dict(fn='dual_clip', low=0.2, high=0.2, most=3.0),
      kl=dict(fn='k3', coef=0.001),
      kl_scale=dict(fn='by_difficulty', hard=0.3, hard_scale=0.5, other_scale=1.0),
      aggregation=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
    ),
  )
