"""R3L, arXiv:2601.03715: failed attempts are tried again from a pivot, and successes have larger advantages.

python -m jaxrl_llm.main --config=r3l
Numbers: 4 attempts and 4 retries, factor 3, advantage 1 from reward 1 up, τ = 1, no ratio and k2 with 0.001 are those
of the official scripts, which name half of their 8 rollouts attempts. There every attempt is reflected on and retried
once, in the same step and in a group with all others; here the first failed one of a group is, in the next two steps:
its retries, the last one of which it replaces, are a group, and the other attempts another one. There steps are turns,
and mathematics begins again from the first; here they are lines. Right attempts are not reflected on. The instructions,
the batch (96 prompts there) and the learning rate (1e-6 there) are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    prompts=8,
    rollouts=4,
    prompt_tokens=448,
    completion_tokens=128,
    curriculum=dict(
      hint=dict(fn='reflected'),
      candidates=dict(fn='stream', multiple=1),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      utility=dict(fn='uniform'),
      eligibility=dict(fn='none'),
    ),
    objective=dict(
      advantage=dict(fn='amplified', right=1.0, factor=3.0, temperature=1.0),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      kl=dict(fn='k2', coef=0.001),
      aggregation=dict(fn='token_mean'),
    ),
  )
