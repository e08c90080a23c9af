"""Short Python functions, graded by tests in a sandbox: 24 rows of configs/rewards/code.jsonl, three asserts each.

python -m jaxrl_llm.main --config=code         (from the root of the repository; needs bubblewrap 0.8)
Numbers: ours, a starting point, not tuned: GRPO as in sums.py, with tokens enough for a function of a few lines. A
row of your own: {"question", "answer", "tests": ["assert …", …]}; rewards.share=True rewards the share of passed
tests.
"""


def get_config():
  return dict(
    base='sums',
    prompt_tokens=96,
    completion_tokens=96,
    rewards=dict(fn='unit_tests', workers=2, deadline_s=10.0),
    data=dict(
      source='jsonl',
      path='configs/rewards/code.jsonl',
      template='{question} Answer with the code alone, in a ```python block.',
      tasks=(),
    ),
  )
