"""AReaL's decoupled PPO, arXiv:2505.24298: one ratio for what sampled, another to clip.

python -m jaxrl_llm.main --config=decoupled_ppo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 is ours; the correction is left whole as in the paper's formula (AReaL's code clamps or masks
it). Two minibatches per batch, so that the policy moves away from the sampler at all: that number is ours.
Sampler and trainer are one program here and agree to about 1e-5, so this acts on rollouts continued from
earlier steps and on drafts. Learning rate and batch are ours, for a 135M model on a laptop.
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
