"""MC-GRPO, arXiv:2601.22582: the median as baseline, with one more rollout per group.

python -m jaxrl_llm.main --config=mc_grpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: G + 1 rollouts, the median and the median deviation are the official script's, and the factor n / #{A ≠ 0} is
that of its trainer for GSM8K; its trainer for MATH has none. Its eps is 1e-3; with rewards of 0 and 1 the deviation
is mostly 0 and A would be 1000, so ours is 0.5. Its KL term of 0.04 and second pass are left out. Learning rate and
batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    rollouts=9,
    objective=dict(
      advantage=dict(fn='median_centered', eps=0.5),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='sequence_mean'),
    ),
  )
