"""DARS, arXiv:2508.13755: prompts with a success rate below one half get more rollouts, until all have the same weight.

python -m jaxrl_llm.main --config=dars_top_ups
Numbers: 8 rollouts, at most four times as many of one prompt (its ET schedule; HW has eight times), advantages
without a standard deviation, and the drop of zero-variance groups are the official code's. Further rollouts come in
the next step instead of at once, at most two slots of it; this and the batch are ours, for a 135M model on a laptop.
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
