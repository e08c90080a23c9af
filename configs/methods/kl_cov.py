"""KL-Cov, arXiv:2505.22617: a KL penalty on the tokens whose advantage and log-probability are both high.

python -m jaxrl_llm.main --config=kl_cov
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: strength 1 and share 2e-4 are verl's (read in code). Two minibatches per batch are ours; with one, every
ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      trust_region=dict(fn='none'),
      kl=dict(fn='covariance', coef=1.0, share=0.0002),
      aggregation=dict(fn='token_mean'),
    ),
  )
