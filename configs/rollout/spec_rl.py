"""SPEC-RL, arXiv:2509.23232: a prompt's last completions are drafts; the part that the policy still accepts is kept.

python -m jaxrl_llm.main --config=spec_rl
Numbers: lenience e^0.15 is the paper's for DAPO; the official script has e^0.5, for GRPO. It saves tokens once prompts
are visited again. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    rollout=dict(draft=dict(fn='lenient', lenience=1.1618)),
  )
