"""VCPO, arXiv:2602.17616: ratios of whole answers, a baseline of least variance, a rate that follows the sample size.

python -m jaxrl_llm.main --config=vcpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: cap 8, base 1, the baseline of least variance and the sample size with uncapped weights and the division by
the group's standard deviation are those of the official code's scripts; the paper's formula does not divide. The norms
of the baseline are the paper's, of ∇log π; the code's are of a gradient that the capped weight multiplies. It takes a
gradient of each answer alone: about twice the update's time; advantage.fn=group_normalized goes without. Two
minibatches per batch, so that the policy moves away from the sampler at all: that number is ours. Learning rate and
batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='least_variance', by_std=True),
      ratio=dict(fn='direct_product'),
      trust_region=dict(fn='cap', most=8.0),
      aggregation=dict(fn='sequence_mean'),
      lr_scale=dict(fn='effective_sample_size', base=1.0),
    ),
  )
