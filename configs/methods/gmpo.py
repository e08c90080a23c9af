"""GMPO, arXiv:2507.20673: the geometric mean of token ratios, each clipped.

python -m jaxrl_llm.main --config=gmpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: log-ratios clipped at ±0.4 are the paper's (TRL's code and its comments). Two minibatches per batch are ours;
with one, every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      trust_region=dict(fn='geometric', low=0.4, high=0.4),
      aggregation=dict(fn='sequence_mean'),
    ),
  )
