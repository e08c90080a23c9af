"""Guess a number in five turns; the environment answers higher or lower. A character model from scratch.

python -m jaxrl_llm.main --config=guess
A supervised warm start on first guesses, then DAPO on whole episodes, which the environment scores. Numbers: ours;
results are in tests/bench/results/guess_game.md. --config.environment.horizon="{'fn': 'stairs', 'starts': (0, 20),
'caps': (3, 5)}" lengthens episodes by step (TTI, arXiv:2506.07976).
"""


def get_config():
  return dict(
    base='tiny',
    scratch=dict(width=64, layers=3, heads=4, kv_heads=4, mlp=256),
    mode='split',
    steps=100,
    prompts=32,
    rollouts=8,
    completion_tokens=24,
    # A word for a hint: one character each, so that an episode is short.
    environment=dict(fn='guess', turns=5, judge='environment', higher='^', lower='v', nothing='?'),
    objective=dict(reward_shaping=dict(fn='none')),
    optimizer=dict(learning_rate=1e-3, decay='linear'),
    sft=dict(steps=60, learning_rate=2e-3, prompts=64),
    data=dict(
      source='games',
      size=128,
      chat=False,
      tasks=(dict(name='guess', top=12, min_span=3, max_span=15),),
    ),
    evaluation=dict(every=30, prompts=32, samples=4),
  )
