"""GiGPO, arXiv:2505.10978: turns that began from the same state are compared, beside whole episodes; on mazes.

python -m jaxrl_llm.main --config=gigpo
Numbers: weight 1 and discount 0.95 are of notes on the official code; the game, a character model and its warm start on
first steps are ours, not tuned. A state is what the maze shows: where one stands and which ways are open.
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
