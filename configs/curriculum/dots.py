"""DOTS, arXiv:2506.05316: every other step, a random reference set predicts the difficulty of all prompts.

python -m jaxrl_llm.main --config=dots
Numbers: a reference set every 2 steps, target 0.5 and temperature 1e-3 are the official code's. Its 256 references
are sampled in addition to the batch; here they are the batch of their step. Its attention over embeddings and its
calibration are trained offline; here a fixed kernel compares the traits of rows (an embedding, where the data has
one: prior_pooling.feature). Its rollout replay is in dots_replay.py. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    curriculum=dict(
      candidates=dict(fn='everything'),
      evidence_decay=dict(fn='reset', every=2),
      prior_pooling=dict(fn='kernel', feature='traits', every=2),
      rate_estimate=dict(fn='mean'),
      utility=dict(fn='bots', target=0.5),
      selection=dict(fn='softmax', temperature=1e-3),
      eligibility=dict(fn='none'),
    ),
  )
