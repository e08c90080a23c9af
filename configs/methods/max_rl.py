"""MaxRL, arXiv:2602.02710: advantages divided by the group's mean, so that rare successes count more.

python -m jaxrl_llm.main --config=max_rl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the method has none; on-policy training and the token mean are our reading of third-party code. Learning rate
and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='mean_relative'),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
    ),
  )
