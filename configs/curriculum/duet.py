"""DUET, arXiv:2605.08441: rollouts go where answers differ most per token, and rare ones count more.

python -m jaxrl_llm.main --config=duet
Numbers: at most 32 rollouts a prompt and weights of 1 / max(n / mean n, 0.05) are the official code's. The deviation
of an answer is reconstructed as that of the posterior. Its stop rule by an answer marker is
`rollout.early_exit.fn=marker`, which bare numbers do not have. Slots of 2 rollouts, 4 slots a prompt on average,
learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='dapo',
    prompts=16,
    rollouts=2,
    curriculum=dict(
      slots_per_prompt=4, allocation=dict(fn='neyman', most=32, propensity_floor=0.05)
    ),
  )
