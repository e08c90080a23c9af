"""VESPO, arXiv:2602.10693: a smooth weight w^k·e^{λ(1−w)} of the ratio of a whole completion.

python -m jaxrl_llm.main --config=vespo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: (k, λ) = (2, 3) and (3, 2) are TRL's defaults (read in code). Two minibatches per batch are ours; with one,
every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      ratio=dict(fn='product'),
      trust_region=dict(fn='gamma', power=2.0, decay=3.0, power_negative=3.0, decay_negative=2.0),
      aggregation=dict(fn='token_mean'),
    ),
  )
