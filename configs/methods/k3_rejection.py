"""k3 rejection (no paper: verl's rollout correction): drops rows whose sampler differs too much from the old policy.

python -m jaxrl_llm.main --config=k3_rejection
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the bound 0.01 on the mean of k3 is verl's (read in code). Unlike there, dropped tokens stay in the
denominator. Sampler and trainer share one program and agree to about 1e-5 here, so the rule matters only for drafts and
for rollouts continued from earlier steps. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      importance_correction=dict(
        fn='sequence_divergence', estimator='k3', reduction='mean', most=0.01
      ),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
