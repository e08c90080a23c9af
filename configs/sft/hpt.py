"""HPT, arXiv:2509.04419: a prompt whose rollouts are all wrong is learned from its demonstration instead.

python -m jaxrl_llm.main --config=hpt
Numbers: gate 0 of 8, weight 1 (0.3 for a model of 1.5B), the mean as baseline, an unclipped ratio and a fixed
denominator are the official code's. It divides the sum over a microbatch's rollouts only by the cap, so that rollouts
weigh more against demonstrations in larger microbatches; here rows are counted. Its learning rate of 5e-6, entropy
bonus of 0.001 and skipped steps beyond a norm of 80 are left out. Demonstrations of the default job are its answers,
a bare number each; --config.data.source=jsonl with a column `solution` gives better ones.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='group_centered'),
      ratio=dict(fn='token'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='fixed'),
      sft_loss=dict(fn='replace', gate=0, weight=1.0),
    ),
  )
