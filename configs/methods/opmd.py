"""OPMD, arXiv:2505.17826: Trinity's policy mirror descent: a soft maximum as baseline, no ratio.

python -m jaxrl_llm.main --config=opmd
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: temperature 1 is the example's (read in code). Two minibatches per batch are ours; with one, every ratio is
1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='log_mean_exp', temperature=1.0),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
    ),
  )
