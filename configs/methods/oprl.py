"""iStar (first named OPRL), arXiv:2509.19199: step rewards from a model that learns to prefer right completions.

python -m jaxrl_llm.main --config=oprl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: beta 0.05 and weight 1 are the official code's. There a step is a turn of an agent; with the one turn here it
is the whole row, so that this adds a second advantage to GRPO's and no finer credit. Both learning rates and the
batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      credit_assignment=dict(fn='steps', weight=1.0),
      auxiliary_model=dict(fn='preference', learning_rate=1e-5, beta=0.05),
    ),
  )
