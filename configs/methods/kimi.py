"""Kimi k1.5, arXiv:2501.12599: REINFORCE with a squared distance to the policy that sampled.

python -m jaxrl_llm.main --config=kimi
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: strength 0.1 is Trinity's and ROLL's (read in code), not checked against the paper. Two minibatches per batch
are ours; with one, every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='group_centered'),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      kl=dict(fn='quadratic', coef=0.1),
      aggregation=dict(fn='token_mean'),
    ),
  )
