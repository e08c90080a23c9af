"""REC-Ring ("GRPO is secretly off-policy"), arXiv:2509.24203: keeps tokens in a band, or moving back to it.

python -m jaxrl_llm.main --config=rec
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: bounds 0.2/0.2 and 0.6/2.0 and no importance weights are the authors' recipe in Trinity-RFT. `one_side` and
`two_side` are its other forms, and `corrected` has their importance weights. Two minibatches per batch are ours; with
one, every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='group_centered'),
      trust_region=dict(
        fn='ring', low=0.2, high=0.2, outer_low=0.6, outer_high=2.0, corrected=False
      ),
      aggregation=dict(fn='token_mean'),
    ),
  )
