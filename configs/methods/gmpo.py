"""GMPO, arXiv:2507.20673: the geometric mean of ratios that are clipped one by one.

python -m jaxrl_llm.main --config=gmpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: log-ratios clipped at ±0.4 are the paper's (TRL's code and its comments). Two minibatches per batch, so
that the policy moves away from the sampler at all: that number is ours. Learning rate and batch are ours, for a
135M model on a laptop.
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
