"""TOPR, arXiv:2503.14286: supervised loss on successes, a truncated ratio of whole completions on failures.

python -m jaxrl_llm.main --config=topr
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: truncation at 1 and the ratio of completions are the paper's (from Trinity's and ROLL's code, which use
tokens: `ratio.fn=direct`). Rewards of 0 and 1 become ±0.5. Two minibatches per batch are ours; with one, every ratio
is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='raw', baseline=0.5),
      ratio=dict(fn='direct_product'),
      trust_region=dict(fn='taper', most=1.0),
      aggregation=dict(fn='sequence_sum'),
    ),
  )
