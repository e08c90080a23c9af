"""DARS, arXiv:2508.13755: prompts of which fewer than half were right get more rollouts, until all weigh the same.

python -m jaxrl_llm.main --config=dars_top_ups
Numbers: 8 rollouts, at most four times as many of one prompt (its ET schedule; HW has eight times), advantages
without a standard deviation, and groups all right or all wrong left out are the official code's. Further rollouts
come with the next call instead of at once, two slots of it at most, and the batch is ours: sized for a 135M model on
a laptop.
"""


def get_config():
  return dict(
    base='sums',
    prompts=6,
    replay=dict(collect=dict(fn='dars', schedule='ET', top_ups=2, most=4)),
    objective=dict(
      advantage=dict(fn='group_centered'),
      aggregation=dict(fn='fixed'),
      zero_variance=dict(fn='mask'),
    ),
  )
