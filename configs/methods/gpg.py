"""GPG, arXiv:2504.02546: the plain policy gradient, scaled up where few rewards differ from 0.

python -m jaxrl_llm.main --config=gpg
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the scale 1 and the token mean are verl's (read in code). Learning rate and batch are ours, for a 135M model on
a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='rescaled', scale=1.0),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
    ),
  )
