"""RLOO, arXiv:2402.14740: REINFORCE with the mean of the other rollouts as baseline.

python -m jaxrl_llm.main --config=rloo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the method has none besides the group (read in verl's code). Learning rate and batch are ours, for a 135M
model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='leave_one_out'),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='sequence_sum'),
    ),
  )
