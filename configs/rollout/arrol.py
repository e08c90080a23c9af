"""ARRoL, arXiv:2603.24840: twice the rollouts begin; after some tokens a learned head keeps half of each group.

python -m jaxrl_llm.main --config=arrol
Numbers: half survive, half of these predicted right, a head of width 128 with learning rate 3e-4 that is used after
20 updates: those of a re-implementation by other authors, since the paper's own code is not public. Its 512 tokens
before the choice are scaled to our cap. Survivors have equal weights in the loss, as in the paper. All other settings
are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    objective=dict(weigh_rows=False),
    rollout=dict(pruning=dict(fn='quality', candidates=16, at_tokens=6)),
  )
