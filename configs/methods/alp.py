"""ALP, arXiv:2603.19470: learned noise in every layer of the update, and one ratio of the noisy policy to what sampled.

python -m jaxrl_llm.main --config=alp
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: sigma 1e-6, its learning rate 5e-4, clip 0.5 and 3 and noise before every layer are those of the official
code's notes (the repository for several turns has 1e-8 and 1e-2); this is its token form. Adam of its own for log
sigma, outside the bound on the gradient's norm, is ours. Two minibatches per batch, so that the policy moves away
from the sampler at all: that number is ours. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      ratio=dict(fn='direct'),
      trust_region=dict(fn='clip', low=0.5, high=3.0),
      aggregation=dict(fn='token_mean'),
      activation_noise=dict(fn='layerwise', sigma=1e-6, learning_rate=5e-4),
    ),
  )
