"""AsymRE, arXiv:2506.20520: a baseline slightly below the mean, so that failures count less off-policy.

python -m jaxrl_llm.main --config=asym_re
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the shift of −0.1 is the paper's (read in Trinity's code). Two minibatches per batch are ours; with one,
every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='shifted', shift=-0.1),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
    ),
  )
