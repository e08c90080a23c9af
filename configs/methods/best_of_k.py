"""Best of k, arXiv:2503.19595: only the best answer of a group learns, by its lead over the second best.

python -m jaxrl_llm.main --config=best_of_k
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the division by the group's standard deviation is verl's default (read in code). Rewards of 0 and 1 give an
advantage to the only right answer of a group. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='best_margin', eps=1e-6),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
