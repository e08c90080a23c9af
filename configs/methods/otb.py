"""Optimal token baseline (no paper: richardli.xyz/optimal-token-baseline): a baseline for each token of a group.

python -m jaxrl_llm.main --config=otb
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the formula is verl's (read in code); the clip and the token mean are ours. Learning rate and batch are ours,
for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='raw'),
      advantage_modulation=dict(fn='token_baseline', eps=1e-8),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
