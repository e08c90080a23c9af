"""AReaL, arXiv:2505.24298: rollouts go on while weights change, and decoupled PPO learns them up to 4 updates later.

python -m jaxrl_llm.main --config=areal
Numbers: a staleness of at most 4 is within those of the official code (2 to 8); clip 0.2 is ours. AReaL interrupts its
sampler for new weights and encodes unfinished completions again. One program does the same between two steps: it stops
when half of the groups are complete, and the others continue with newer weights until rollout.max_age=4. The objective
is that of decoupled_ppo.py, all other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='decoupled_ppo',
    prompts=8,
    rollout=dict(stop=dict(fn='groups', fraction=0.5), max_age=4),
  )
