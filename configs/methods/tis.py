"""TIS (no paper: fengyao.notion.site/off-policy-rl): truncated importance sampling per token.

python -m jaxrl_llm.main --config=tis
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the bound of 2 is verl's and slime's (read in code). Sampler and trainer share one program and agree to about
1e-5 here, so the correction matters only for drafts and for rollouts continued from earlier steps. Learning rate and
batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      importance_correction=dict(fn='token_truncate', low=0.0, high=2.0),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
    ),
  )
