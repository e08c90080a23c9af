"""ARRoL, arXiv:2603.24840: twice the rollouts begin; after some tokens a learned head keeps half of each group.

python -m jaxrl_llm.main --config=arrol
Numbers: half survive, half of them to be right, a head of 128 with learning rate 3e-4 that is listened to
after 20 updates: of a re-implementation by other authors, the paper's own code is not public; its 512
tokens before the choice are scaled to our cap. Survivors count alike in the loss, as in the paper. All else is
dapo.py's.
"""


def get_config():
  return dict(
    base='dapo',
    objective=dict(weigh_rows=False),
    rollout=dict(pruning=dict(fn='quality', candidates=16, at_tokens=6)),
  )
