"""ReMix, arXiv:2507.06892: recent groups beside new ones, clipped around their first ratio; a KL term that moves.

python -m jaxrl_llm.main --config=remix
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: reconstructed from the abstract and third-party notes: clip 0.2; KL to the first weights alone for 50 steps,
then by tenths to those before the batch until both count half; groups of the last 2 steps, half of a batch (0.4 in the
notes) so that minibatches divide it; after 50 steps the policy becomes the reference and no group is replayed. Steps of
both KL settings are optimizer steps, two for each batch, which are ours. So are the coefficient 0.001, the form k3,
mixed groups alone, learning rate and batch, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    replay=dict(reuse=dict(fn='mixed_groups', share=0.5, max_age=2, steps=50)),
    learner=dict(minibatches=2),
    objective=dict(
      ratio=dict(fn='direct'),
      trust_region=dict(fn='shifted_clip', low=0.2, high=0.2),
      kl=dict(fn='receding', coef=0.001, wait=50, every=10, fall=0.1, least=0.5),
      reference=dict(fn='reincarnated', after=100),
      aggregation=dict(fn='token_mean'),
    ),
  )
