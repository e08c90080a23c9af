"""BOTS, arXiv:2510.26374: every step updates all posteriors, by the policy's place between two models.

python -m jaxrl_llm.main --config=bots
Numbers: decay 0.1 a step, ρ 0.1, momentum 0.9, target 0.5, and the best Thompson draws of all prompts are the
official code's. The default job has no pass rates of other models: the two names are empty, which means 0 and 1 for
every prompt. Rows with pass rates name their fields here (prior_pooling.weak, prior_pooling.strong). With 4 prompts a
step of 780, a decay of a tenth a step leaves little of a prompt's own evidence. All other settings are those of
dapo.py.
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
