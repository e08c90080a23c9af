"""PPO-EWMA, arXiv:2110.00641: the trust region is around an average of the weights instead of the sampler.

python -m jaxrl_llm.main --config=ppo_ewma
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 and the cap of 100 are those of the official code (read), which caps the product of both ratios;
here only the correction is capped. The decay, a center of mass of 8 optimizer steps, is from memory of the paper.
Group-relative advantages, without a value function, are ours. Two minibatches per batch are ours; with one, every
ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
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
