"""Aurora, arXiv:2602.06932: a head drafts the next tokens of a rollout, and each update trains it on the rollouts.

python -m jaxrl_llm.main --config=aurora
Drafts change no token. Numbers: the learning rate, its bound and the loss are those of the official code; three draft
tokens instead of its seven, a head without attention, and the cost of an iteration with drafts, 1.5 of one without, are
ours. All other settings are those of dapo.py; results are in tests/bench/results/draft_head.md.
"""


def get_config():
  return dict(base='dapo', rollout=dict(draft_head=dict(fn='eagle', tokens=3, cost=1.5)))
