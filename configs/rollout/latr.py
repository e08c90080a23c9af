"""LATR, arXiv:2510.24302: rollouts branch where the two likeliest tokens are close; similar ones are pruned.

python -m jaxrl_llm.main --config=latr
Numbers: thresholds are the official code's for mathematics; its ages of 20, 30 and 50 tokens are scaled to our cap.
All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    rollout=dict(tree=dict(fn='latr', ages=(3, 5, 8))),
  )
