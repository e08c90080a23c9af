"""MiniRL (Qwen), arXiv:2512.01374: a corrected and clipped sum over tokens, without length normalization.

python -m jaxrl_llm.main --config=mini_rl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2/0.27 is from third-party notes, the advantage without a standard deviation from memory. Two
minibatches per batch are ours; with one, every ratio is 1. Sampler and trainer share one program and agree to about
1e-5 here, so the correction matters only for drafts and for rollouts continued from earlier steps. Learning rate and
batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='group_centered'),
      importance_correction=dict(fn='token'),
      trust_region=dict(fn='clip', low=0.2, high=0.27),
      aggregation=dict(fn='sequence_sum'),
    ),
  )
