"""GiGPO, arXiv:2505.10978: turns from the same state are compared with each other, beside whole episodes; on mazes.

python -m jaxrl_llm.main --config=gigpo
Numbers: weight 1, discount 0.95 and the deviation in both terms are those of its author's runs on ALFWorld; other runs
leave out the deviation (mean_norm: advantage.fn=group_centered, credit_assignment.by_std=False). The game, the
character model and its warm start on first moves are ours, not tuned. A state is what the maze shows: the position and
the open directions.
"""


def get_config():
  return dict(
    base='guess',
    prompt_tokens=32,
    completion_tokens=96,
    environment=dict(fn='walk', turns=7, judge='environment'),
    objective=dict(credit_assignment=dict(fn='gigpo', weight=1.0, discount=0.95)),
    data=dict(
      size=64,
      tasks=(dict(name='walk', min_size=2, max_size=4, walls=2),),
    ),
  )
