"""Pass@k Training, arXiv:2508.10751: the advantage of a group's k-subsets, of which one right answer is enough.

python -m jaxrl_llm.main --config=pass_at_k
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the formula is the official code's (read in code); k = 4, the clip and the token mean are ours. Learning rate
and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='pass_at_k', k=4, right=0.5, eps=1e-6),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
