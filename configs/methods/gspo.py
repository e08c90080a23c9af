"""GSPO, arXiv:2507.18071: one ratio per completion: the geometric mean of its tokens' ratios.

python -m jaxrl_llm.main --config=gspo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 3e-4 and 4e-4 and four minibatches per batch are the paper's (section 5.1, from TRL's index). Learning
rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=4),
    objective=dict(
      ratio=dict(fn='sequence'),
      trust_region=dict(fn='clip', low=3e-4, high=4e-4),
      aggregation=dict(fn='sequence_mean'),
    ),
  )
