"""DOT, arXiv:2601.03969: where a whole group is right, the longest completions are cut and graded again.

python -m jaxrl_llm.main --config=dot
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the paper cuts completions that exceed the mean by 3 standard deviations and 32 tokens; for groups of 16 and
a cap of 16 tokens we use 2 and 2. Its KL-Cov and its prediction of which prompts to sample are left out (the
curriculum does that here); the clip and the mean over tokens are ours, its mean is over rows. Zero-variance groups
leave the loss, as in its dynamic sampling. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    rollouts=16,
    rewards=dict(truncate=dict(fn='outliers', deviations=2.0, least_tokens=2)),
    objective=dict(
      trust_region=dict(fn='clip', low=0.2, high=0.28),
      aggregation=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
    ),
  )
