"""XRPO, arXiv:2510.06672: a bonus for right answers that the policy finds unlikely.

python -m jaxrl_llm.main --config=configs/xrpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: strength and bound of 1 are from third-party notes; its allocation of rollouts is not in here. Learning
rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums.py',
    objective=dict(
      emphasis=dict(fn='sharpen', strength=1.0, most=1.0),
      trust=dict(fn='clip', low=0.2, high=0.2),
    ),
  )
