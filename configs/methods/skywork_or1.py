"""Skywork-OR1, arXiv:2505.22312: an entropy bonus whose coefficient rises while the entropy is below a target.

python -m jaxrl_llm.main --config=skywork_or1
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: target 0.2 nats, coefficients from 0 to 0.005 in steps of 1e-4, clip 0.2, the token mean and the drop of
zero-variance groups are the scripts' for 7B (read in code). Its stages of growing length and its filter of prompts are
left out. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
      entropy_bonus=dict(fn='adaptive', target=0.2, coef=0.0, delta=1e-4, low=0.0, high=0.005),
    ),
  )
