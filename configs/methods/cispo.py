"""CISPO (MiniMax-M1), arXiv:2506.13585: the ratio is a bounded weight, and no token is dropped.

python -m jaxrl_llm.main --config=cispo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: an upper bound alone is MiniMax's; 1 + 4 = 5 is slime's and ScaleRL's (read in code). Three conventions
exist: `cap`, `cap_above`, `cap_band`. Two minibatches per batch are ours; with one, every ratio is 1. Learning rate
and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      trust_region=dict(fn='cap_above', high=4.0),
      aggregation=dict(fn='token_mean'),
    ),
  )
