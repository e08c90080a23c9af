"""MinPRO, arXiv:2601.22718: a token's ratio times the smallest ratio before it.

python -m jaxrl_llm.main --config=minpro
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: reconstructed from the abstract and third-party notes; the clip of 0.2 is not verified. Two minibatches per
batch are ours; with one, every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      ratio=dict(fn='prefix_min'),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
