"""Dr.GRPO, arXiv:2503.20783: no division by the group's standard deviation or by the length of a completion.

python -m jaxrl_llm.main --config=dr_grpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: no KL term and 8 rollouts are the official script's (read in code). The denominator is the cap on tokens,
3000 there and ours here. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='group_centered'),
      aggregation=dict(fn='fixed'),
    ),
  )
