"""Copies of up to 1,000 digits under a cap of 4,096 tokens: long completions for a small character model.

python -m jaxrl_llm.main --config=long_copy
Four ranges of lengths, so that the curriculum has some between those that the warm start teaches and those that it does
not. The cache grows with the longest row, and the update packs rows by their own length: time follows the tokens that
occur (tests/bench/results/long_job.md). Numbers: ours, a starting point, not tuned; the accuracy that it reaches has
not been measured.
"""


def get_config():
  return dict(
    base='tiny',
    scratch=dict(width=64, layers=2, heads=2, kv_heads=1, mlp=256, max_tokens=5120),
    prompts=8,
    rollouts=8,
    prompt_tokens=1008,
    completion_tokens=4096,
    rollout=dict(windows=3),  # rings of 1,024, 2,048 and 4,096 columns
    sft=dict(steps=150, learning_rate=2e-3, prompts=32),
    data=dict(
      size=4000,
      tasks=tuple(
        dict(name='copy', min_length=low, max_length=high)
        for low, high in ((4, 16), (17, 64), (65, 250), (251, 1000))
      ),
    ),
    evaluation=dict(every=0, prompts=16, samples=0),
  )
