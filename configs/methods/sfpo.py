"""SFPO, arXiv:2510.04072: a few fast steps on a batch, interpolation toward their start, one slow step from there.

python -m jaxrl_llm.main --config=sfpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: three fast steps, alpha 0.8, and fast steps that end one standard deviation above the mean entropy of 30
batches are the official code's. The objective is GRPO's, as in the paper. Adam's moments continue through all four
steps of a batch; only the weights are interpolated. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    optimizer=dict(outer=dict(fn='slow_fast', fast_steps=3, alpha=0.8, window=30, threshold=1.0)),
  )
