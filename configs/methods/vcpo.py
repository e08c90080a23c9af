"""VCPO, arXiv:2602.17616: sequence ratios, least-variance baseline, learning rate by effective sample size.

python -m jaxrl_llm.main --config=vcpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: cap 8, base 1, the least-variance baseline, the sample size from uncapped weights and the division by the
group's standard deviation are those of the official scripts; the paper's formula does not divide. The norms of the
baseline are the paper's, of ∇log π; the code's include the capped weight. Each completion needs its own gradient,
about twice the update's time; advantage.fn=group_normalized avoids that. Two minibatches per batch are ours; with
one, every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
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
