"""OPO, arXiv:2505.23585: a baseline weighted by length, exactly on-policy.

python -m jaxrl_llm.main --config=opo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: one update per batch and the baseline are the paper's (read in verl's code). With a ratio of 1 the clip has
no effect. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='length_weighted'),
      aggregation=dict(fn='token_mean'),
    ),
  )
