"""Beyond the 80/20 rule, arXiv:2506.01939: DAPO on the fifth of the tokens with the highest entropy.

python -m jaxrl_llm.main --config=forking
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the share 0.2 and clip 0.2/0.28 are the paper's (TRL's index). Learning rate and batch are ours, for a 135M
model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      token_weighting=dict(fn='forking', share=0.2),
      trust_region=dict(fn='clip', low=0.2, high=0.28),
      aggregation=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
    ),
  )
