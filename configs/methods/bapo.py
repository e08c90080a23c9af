"""BAPO, arXiv:2510.18927: clip bounds that widen until positive terms outweigh negative ones.

python -m jaxrl_llm.main --config=bapo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: bounds from (0.6, 1.2) to (0.8, 2) in steps of 0.05, target 1 and dual clip 3 are those of the recipe's code;
its README has a share of 0.5. Two minibatches per batch are ours; with one, every ratio is 1. Learning rate and batch
are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      trust_region=dict(fn='balanced_clip', target=1.0, most=3.0),
      aggregation=dict(fn='token_mean'),
    ),
  )
