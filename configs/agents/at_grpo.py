"""AT-GRPO, arXiv:2510.11062: two agents in turns, each compared with itself at the same turn of other rollouts.

python -m jaxrl_llm.main --config=at_grpo
One agent moves along the rows of a grid with walls, the other along its columns; the policy is both, as with the
paper's shared policy. A turn is paid for its own progress, 1 together at the goal. A supervised start on
random moves shows the form. Numbers: ours; results are in tests/bench/results/two_agents.md.
"""


def get_config():
  return dict(
    base='guess',
    steps=60,
    prompt_tokens=16,
    completion_tokens=136,
    scratch=dict(max_tokens=192),
    environment=dict(
      fn='pair_walk',
      turns=8,
      judge='environment',
      win=0.0,
      progress=1.0,
      batching=dict(fn='turns'),
    ),
    objective=dict(
      advantage=dict(fn='raw'),
      credit_assignment=dict(fn='turn_grouped'),
      zero_variance=dict(fn='keep'),
    ),
    data=dict(tasks=(dict(name='pair_walk', min_size=2, max_size=4, walls=1),)),
  )
