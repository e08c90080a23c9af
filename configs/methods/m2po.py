"""M2PO, arXiv:2510.01161: masks tokens until the second moment of the harmful log-ratios is within a budget.

python -m jaxrl_llm.main --config=m2po
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: budget 0.04 and the narrowest bounds 0.3 and 0.5 are the official code's; `second_moment_mask` is Trinity's
version. Two minibatches per batch are ours; with one, every ratio is 1. Learning rate and batch are ours, for a 135M
model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      trust_region=dict(fn='second_moment_clip', budget=0.04, low=0.3, high=0.5),
      aggregation=dict(fn='token_mean'),
    ),
  )
