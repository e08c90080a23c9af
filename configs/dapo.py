"""DAPO, arXiv:2503.14476: clip-higher, token-mean loss, soft overlong penalty in tokens, mixed groups only.

python -m jaxrl_llm.main --config=dapo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2/0.28, token-mean and the shape of the overlong penalty are the paper's; its buffer (4096 of
20480 tokens there) is scaled to our cap, its factor is halved; where the paper draws more groups until
enough are mixed, the curriculum here chooses prompts that are likely to be, and all-equal groups leave loss
and denominator. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      trust_region=dict(fn='clip', low=0.2, high=0.28),
      aggregation=dict(fn='token_mean'),
      reward_shaping=dict(fn='overlong', buffer_tokens=4, factor=0.5),
      zero_variance=dict(fn='mask'),
    ),
  )
