"""VCPO, arXiv:2602.17616: ratios of whole answers, and a learning rate that falls with the effective sample size.

python -m jaxrl_llm.main --config=configs/vcpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: cap 8 and base 1 are the official code's. Its baseline of least variance needs a gradient norm per
answer and is not in here: the group's mean stands for it. Two minibatches per batch, so that the policy moves
away from the sampler at all: that number is ours. Learning rate and batch are ours, for a 135M model on a
laptop.
"""


def get_config():
  return dict(
    base='sums.py',
    updates_per_rollout=2,
    objective=dict(
      advantage=dict(fn='group_centered'),
      ratio=dict(fn='direct_product'),
      trust=dict(fn='cap', most=8.0),
      aggregate=dict(fn='sequence_mean'),
      lr_scale=dict(fn='effective_sample_size', most=8.0, base=1.0),
    ),
  )
