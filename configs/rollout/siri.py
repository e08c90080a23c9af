"""SIRI, arXiv:2509.25176: the length cap falls and rises along a cosine.

python -m jaxrl_llm.main --config=siri
Numbers: from the full cap to half of it are the paper's 16k and 8k; its cycle of 640 steps (from notes on it) is
scaled to our run. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    rollout=dict(length_schedule=dict(fn='cosine', low=8, period=30)),
  )
