"""AReaL's approximation, arXiv:2505.24298: decoupled PPO whose old log-probs are interpolated by age, without a pass.

python -m jaxrl_llm.main --config=areal_interpolated
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the formula is that of the official code (log-linear in the version; versions are optimizer steps here and
training steps there), clip 0.2 is ours; the correction is left whole, as in decoupled_ppo.py. Two minibatches per
batch, so that the policy moves away from the sampler at all: that number is ours. Tokens of rollouts continued from
earlier steps are the only ones older than their batch, so this acts with rollout.stop, drafts or mode=lag. Learning
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
