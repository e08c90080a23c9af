"""R3L, arXiv:2601.03715: failed attempts are tried again from a pivot, and successes have larger advantages.

python -m jaxrl_llm.main --config=r3l
Numbers: 4 attempts and 4 retries of a prompt, factor 3, advantage 1 from reward 1 up, τ = 1, no ratio and k2 with 0.001
are those of the official scripts. There each attempt is reflected on and retried once, in the same step, and all eight
share a baseline. Here the first failed attempt of a group is reflected on in the next step and retried in the one
after; its retries, the last one of which it replaces, are a group of their own beside the other attempts. Right
attempts are not reflected on. A step is a turn there, and mathematics begins again from the first one; here it is a
line of the completion. The instructions, the batch (96 prompts there) and the learning rate (1e-6 there) are ours, for
a 135M model on a laptop.
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
