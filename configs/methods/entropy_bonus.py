"""Entropy bonus, arXiv:1602.01783: DAPO, and the mean entropy of the tokens in the loss, times a fixed coefficient.

python -m jaxrl_llm.main --config=entropy_bonus
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the coefficient 0.001 is verl's (read in code). Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='dapo',
    objective=dict(
      entropy_bonus=dict(fn='fixed', coef=0.001),
    ),
  )
