"""DRPO, arXiv:2510.04474: short right answers against a soft maximum of wrong ones, and a hinge on the KL divergence.

python -m jaxrl_llm.main --config=drpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: temperature 10, length rate 0.1, and the hinge of 1e3 beyond 1e-4 are the official code's; max_tokens is our
cap. Two minibatches per batch are ours; with one, every ratio is 1. Learning rate and batch are ours, for a 135M
model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='raw', baseline=0.5),
      ratio=dict(fn='one'),
      trust_region=dict(fn='listwise', max_tokens=16, temperature=10.0, length_rate=0.1),
      kl=dict(fn='hinge', coef=1e3, delta=1e-4),
      aggregation=dict(fn='sequence_mean'),
    ),
  )
