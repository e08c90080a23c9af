"""AReaL's approximation, arXiv:2505.24298: decoupled PPO; old log-probs are interpolated by age, without a pass.

python -m jaxrl_llm.main --config=areal_interpolated
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the formula is the official code's (log-linear in the version). Versions are optimizer steps here, and α is
exact before the first one on a batch; there they are training steps, and α is that of the step before: (d − 1) / d
for a token d training steps old, where ours is 1, then less. Clip 0.2 is ours; the correction is not truncated, as in
decoupled_ppo.py. Two minibatches per batch are ours; with one, every ratio is 1. Only tokens of rollouts that were
continued from earlier steps are older than their batch, so this acts with rollout.stop, drafts or mode=lag. Learning
rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      importance_correction=dict(fn='token'),
      old_policy=dict(fn='interpolated'),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
