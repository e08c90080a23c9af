"""DAPO, arXiv:2503.14476: clip-higher, token-mean loss, overlong penalty in tokens, mixed groups only.

python -m jaxrl_llm.main --config=dapo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2/0.28, the token mean and the shape of the overlong penalty are the paper's. Its buffer (4096 of
20480 tokens there) is scaled to our cap, and its factor is halved. The paper samples more groups until enough are
mixed; here the curriculum chooses prompts that are likely to be mixed, and zero-variance groups leave loss and
denominator. Learning rate and batch are ours, for a 135M model on a laptop.
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
