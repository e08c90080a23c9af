"""LitePPO ("Tricks or Traps"), arXiv:2508.08221: the group's mean, the batch's standard deviation, token-mean loss.

python -m jaxrl_llm.main --config=lite_ppo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: symmetric clip 0.2, 8 rollouts and no overlong filter are the paper's (from documentation); eps 1e-4 is
TRL's. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='batch_normalized', eps=1e-4),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
