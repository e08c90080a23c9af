"""SPEC-RL, arXiv:2509.23232: a prompt's last answers are drafts; what the policy still stands by is kept.

python -m jaxrl_llm.main --config=spec_rl
Numbers: lenience e^0.15 is the official code's for DAPO. It begins to save tokens where prompts come back. All
else is dapo.py's.
"""


def get_config():
  return dict(
    base='dapo',
    rollout=dict(draft=dict(fn='lenient', lenience=1.1618)),
  )
