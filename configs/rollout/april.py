"""APRIL, arXiv:2509.18521: twice the prompts are submitted; when half of the groups are whole, the step goes on.

python -m jaxrl_llm.main --config=april
Numbers: 64 groups submitted for 32 needed are the official code's. Unfinished groups go on in the next step. All
else is dapo.py's. With --config.rollout.carry_cache=True they keep their keys and values, those of older weights
(arXiv:2509.19128, PipelineRL), and are not encoded again.
"""


def get_config():
  return dict(
    base='dapo',
    prompts=8,
    rollout=dict(stop=dict(fn='groups', fraction=0.5)),
  )
