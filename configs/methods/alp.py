"""ALP, arXiv:2603.19470: learned noise in every layer of the update, and one ratio of the noisy policy to the sampler.

python -m jaxrl_llm.main --config=alp
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: sigma 1e-6, its learning rate 5e-4, clip 0.5 and 3, and noise before every layer are those of the official
code's notes (its multi-turn repository has 1e-8 and 1e-2); this is the token form. A separate Adam for log sigma,
outside the bound on the gradient norm, is ours. Two minibatches per batch are ours; with one, every ratio is 1.
Learning rate and batch are ours, for a 135M model on a laptop.
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
