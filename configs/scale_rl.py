"""ScaleRL, arXiv:2510.13786: truncated weights instead of a clip, every prompt counts the same.

python -m jaxrl_llm.main --config=configs/scale_rl.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: cap 5 (4 and 8 did as well), prompt mean and the drop of all-equal groups are the paper's (third-party
notes) and TRL's (read in code). Rewards are 0 and 1 instead of ±1; the history of prompts and the thinking
budget are not in here. Two minibatches per batch, so that the policy moves away from the sampler at all: that
number is ours. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums.py',
    updates_per_rollout=2,
    objective=dict(
      advantage=dict(fn='batch_normalized', eps=1e-4),
      ratio=dict(fn='direct'),
      trust=dict(fn='cap', most=5.0),
      aggregate=dict(fn='prompt_mean'),
      zero_variance=dict(fn='mask'),
    ),
  )
