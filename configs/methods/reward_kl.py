"""KL in the reward, arXiv:1909.08593: each score minus a multiple of the row's log-ratio to the reference model.

python -m jaxrl_llm.main --config=reward_kl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the k1 estimator with coefficient 0.001 is verl's default for `use_kl_in_reward` (read in code); the paper
adapts its coefficient. The advantage is GRPO's. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      reward_kl=dict(fn='k1', coef=0.001),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
