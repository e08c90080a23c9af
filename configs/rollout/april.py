"""APRIL, arXiv:2509.18521: twice the prompts are submitted; the step ends when half of the groups are complete.

python -m jaxrl_llm.main --config=april
Numbers: 64 groups submitted for 32 needed are the official code's. Unfinished groups continue in the next step. With
--config.rollout.carry_cache=True they keep their keys and values, which are of older weights (arXiv:2509.19128,
PipelineRL), and are not encoded again. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    prompts=8,
    rollout=dict(stop=dict(fn='groups', fraction=0.5)),
  )
