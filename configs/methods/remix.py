"""ReMix, arXiv:2507.06892: PPO's clip around a batch's first ratio; a KL term whose reference moves.

python -m jaxrl_llm.main --config=remix
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: reconstructed from third-party notes: clip 0.2; KL to the first weights alone for 50 steps, then by tenths to
those before the batch until both count half. The coefficient 0.001 and the form k3 are ours. Replay of old rollouts
(a share of 0.4) and the switch back to on-policy are left out. Two minibatches per batch are ours; with one, every
ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
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
