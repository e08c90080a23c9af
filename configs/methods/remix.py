"""ReMix, arXiv:2507.06892: PPO's clip around the ratio that the batch began with, a KL that forgets the first weights.

python -m jaxrl_llm.main --config=remix
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: reconstructed from third-party notes: the clip 0.2, and KL to the first weights alone for 50 steps, then by
tenths to those before the batch until both count half. Its coefficient 0.001 and the form k3 are ours. Mixing in old
rollouts (a share of 0.4) and the switch back to on-policy are not in here. Two minibatches per batch, so that the
policy moves away from the sampler at all: that number is ours. Learning rate and batch are ours, for a 135M model on
a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      ratio=dict(fn='direct'),
      trust_region=dict(fn='shifted_clip', low=0.2, high=0.2),
      kl=dict(fn='receding', coef=0.001, wait=50, every=10, fall=0.1, least=0.5),
      aggregation=dict(fn='token_mean'),
    ),
  )
