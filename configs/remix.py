"""ReMix, arXiv:2507.06892: PPO's clip around the ratio that the batch began with: the trust region alone.

python -m jaxrl_llm.main --config=configs/remix.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: reconstructed from third-party notes. Mixing in old rollouts (a share of 0.4), its two KL terms and the
switch back to on-policy are not in here. Two minibatches per batch, so that the policy moves away from the
sampler at all: that number is ours. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums.py',
    updates_per_rollout=2,
    objective=dict(
      ratio=dict(fn='direct'),
      trust=dict(fn='shifted_clip', low=0.2, high=0.2),
      aggregate=dict(fn='token_mean'),
    ),
  )
