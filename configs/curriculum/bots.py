"""BOTS, arXiv:2510.26374: every step tells every prompt something, by the policy's place between two models.

python -m jaxrl_llm.main --config=bots
Numbers: forgetting 0.1 a step, ρ 0.1, momentum 0.9, target 0.5, Thompson draws over all prompts and the best of
them are the official code's. The default job has no pass rates of other models: the two names are empty, which
is 0 and 1 for every prompt. Rows with such rates name their fields here (share.weak, share.strong). Of 4 prompts a
step among 780, forgetting a tenth a step leaves little of a prompt's own evidence. All else is dapo.py's.
"""


def get_config():
  return dict(
    base='dapo',
    curriculum=dict(
      candidates=dict(fn='everything'),
      evidence_decay=dict(fn='step', decay=0.9),
      prior_pooling=dict(fn='anchors', weak='', strong='', rho=0.1),
      rate_estimate=dict(fn='thompson'),
      utility=dict(fn='bots', target=0.5),
      selection=dict(fn='top'),
      eligibility=dict(fn='none'),
    ),
  )
