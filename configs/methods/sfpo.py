"""SFPO, arXiv:2510.04072: a few fast steps on a batch, back towards where they began, one slow step from there.

python -m jaxrl_llm.main --config=sfpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: three fast steps, alpha 0.8, and the end of fast steps one standard deviation above the mean entropy of 30
batches are the official code's; the objective is GRPO's, as in the paper. Adam's moments run on through all four steps
of a batch; only the weights are put back. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    optimizer=dict(outer=dict(fn='slow_fast', fast_steps=3, alpha=0.8, window=30, threshold=1.0)),
  )
