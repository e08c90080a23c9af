"""DOT, arXiv:2601.03969: where all of a group are right, those that say far more than others are cut and graded again.

python -m jaxrl_llm.main --config=dot
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the paper cuts at the mean and 3 standard deviations what is 32 tokens longer; for groups of 16 and a cap of
16 tokens we cut at 2, what is 2 longer. Its KL-Cov and its prediction of which prompts to draw are left out
(the curriculum here does that). All-equal groups leave the loss, as in its dynamic sampling. Learning rate and
batch are ours, for a 135M model on a laptop.
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
