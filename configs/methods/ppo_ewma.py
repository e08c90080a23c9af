"""PPO-EWMA, arXiv:2110.00641: the trust region is around an average of the weights, not around what sampled.

python -m jaxrl_llm.main --config=ppo_ewma
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 and the cap of 100 are those of the official code (read), which caps the product of both ratios
where this caps the correction alone; the decay, a center of mass of 8 optimizer steps, is from memory of the paper.
The group's advantages, without a value function, are ours. Two minibatches per batch, so that the policy moves away
from the sampler at all: that number is ours. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      importance_correction=dict(fn='token_truncate', low=0.0, high=100.0),
      old_policy=dict(fn='average', decay=0.889),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
