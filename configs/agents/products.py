"""A calculator that the model learns to call: products of two numbers of two digits. A character model from scratch.

python -m jaxrl_llm.main --config=products
A supervised start in which a quarter of the demonstrations call the calculator and the others answer at once, then DAPO
on whole episodes, whose last turn is graded. A call is <c>37*48</c>. Numbers: ours; results are in
tests/bench/results/tool_calls.md.
"""


def get_config():
  return dict(
    base='tiny',
    scratch=dict(width=64, layers=3, heads=4, kv_heads=4, mlp=256),
    mode='split',
    steps=80,
    prompts=32,
    rollouts=8,
    prompt_tokens=8,
    completion_tokens=40,
    rollout=dict(early_exit=dict(fn='text', text='</c>')),
    environment=dict(fn='calculator', tag='c', turns=3, weight=0.0, observation_tokens=8),
    objective=dict(reward_shaping=dict(fn='none')),
    optimizer=dict(learning_rate=1e-3, decay='linear'),
    rewards=dict(fn='number'),
    sft=dict(steps=300, learning_rate=2e-3, prompts=64),
    data=dict(source='puzzles', size=4000, tasks=(dict(name='products', calls=25),)),
    evaluation=dict(every=20, prompts=64, samples=4),
  )
