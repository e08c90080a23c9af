"""IcePop (Ring-1T), arXiv:2510.18855: tokens are weighted by the ratio of trainer to sampler, within a band.

python -m jaxrl_llm.main --config=icepop
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the band 0.5 to 5 is the frameworks' default (read in code), not checked against the paper. Sampler and
trainer share one program and agree to about 1e-5 here, so the correction matters only for drafts and for rollouts
continued from earlier steps. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      importance_correction=dict(fn='token_mask', low=0.5, high=5.0),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
