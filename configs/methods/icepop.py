"""IcePop (Ring-1T), arXiv:2510.18855: GRPO times ρ for each token, tokens outside a band dropped.

python -m jaxrl_llm.main --config=icepop
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the band 0.5 to 5 is the frameworks' default (read in code), not checked against the paper. Sampler and
trainer are one program here and agree to about 1e-5, so this acts on rollouts continued from earlier steps and
on drafts. Learning rate and batch are ours, for a 135M model on a laptop.
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
