"""GRESO, arXiv:2506.02177: prompts whose groups had zero variance several times in a row are likely to be skipped.

python -m jaxrl_llm.main --config=greso
Numbers: marks 0.98 and 0.11 of rewards of 1 and 0.1, target 0.25, p from 0.5 by 0.01 within [0.05, 0.95] and the
floor 0.01 are the official code's, which samples until a batch is full and moves p once a batch. The stream continues
where it stopped: a step reads at most twice its prompts, and those after the last one it takes wait for the next
step. Zero-variance groups are replaced in further steps. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    replay=dict(collect=dict(fn='mixed', patience=3)),
    curriculum=dict(
      candidates=dict(fn='stream', multiple=2),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      rate_estimate=dict(fn='mean'),
      utility=dict(fn='uniform'),
      selection=dict(fn='skip'),
      eligibility=dict(fn='streaks'),
    ),
  )
