"""Knapsack RL, arXiv:2509.25849: rollouts are allocated one by one to the prompt with the largest marginal gain.

python -m jaxrl_llm.main --config=knapsack
Numbers: a gain of p(1 − p)² and at most 128 rollouts a prompt are the paper's. The posterior instead of the last
observed rate, slots of 2 rollouts, 4 slots a prompt on average, learning rate and batch are ours, for a 135M model on
a laptop.
"""


def get_config():
  return dict(
    base='dapo',
    prompts=16,
    rollouts=2,
    curriculum=dict(slots_per_prompt=4, allocation=dict(fn='marginal', right=1, wrong=2, most=128)),
  )
