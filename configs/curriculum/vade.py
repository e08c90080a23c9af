"""VADE, arXiv:2511.18902: Thompson draws, utility p(1 − p)², evidence that decays by visits and by steps.

python -m jaxrl_llm.main --config=vade
Numbers: prior Beta(1, 1) and the utility are those of the project page. The abstract has two rates of decay; their
form and both numbers are ours. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    curriculum=dict(
      candidates=dict(fn='everything'),
      evidence_decay=dict(fn='two_scale', per_visit=0.5, per_step=0.999),
      prior_pooling=dict(fn='none'),
      rate_estimate=dict(fn='thompson'),
      utility=dict(fn='vade'),
      selection=dict(fn='top'),
      eligibility=dict(fn='none'),
    ),
  )
