"""REC-Ring ("GRPO is secretly off-policy"), arXiv:2509.24203: keeps a band, and tokens that the gradient brings back.

python -m jaxrl_llm.main --config=rec
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: bounds 0.2/0.2 and 0.6/2.0 and no importance weights are the authors' recipe in Trinity-RFT; `one_side` and
`two_side` are its other forms, and `corrected` their importance weights.
Two minibatches per batch, so that the policy moves away from the sampler at all: that number is ours. Learning
rate and batch are ours, for a 135M model on a laptop.
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
