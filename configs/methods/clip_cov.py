"""Clip-Cov, arXiv:2505.22617: drops some of the tokens whose advantage and log-probability are both high.

python -m jaxrl_llm.main --config=clip_cov
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: share 2e-4 and the band 1 to 5 are verl's. verl drops tokens at random; here each token in the band loses
that share of its weight. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      token_weighting=dict(fn='covariance_clip', share=0.0002, low=1.0, high=5.0),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
