"""AReaL's decoupled PPO, arXiv:2505.24298: one ratio corrects for the sampler, another one is clipped.

python -m jaxrl_llm.main --config=decoupled_ppo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 is ours. The correction is not truncated, as in the paper's formula (AReaL's code clamps or masks
it). Two minibatches per batch are ours; with one, every ratio is 1. Sampler and trainer share one program and agree
to about 1e-5 here, so the correction matters only for drafts and for rollouts continued from earlier steps. Learning
rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      importance_correction=dict(fn='token'),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
