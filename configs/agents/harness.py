"""An agent written against OpenAI's client, trained as it is through the endpoint. A character model from scratch.

pip install openai; python -m jaxrl_llm.main --config=harness
The agent plays the game of guess.py and returns its reward. Your own is --config.environment.harness=module:function,
or --config.environment.command="('python', 'agent.py')". Numbers: ours; results are in
tests/bench/results/guess_game.md.
"""


def get_config():
  return dict(
    base='tiny',
    scratch=dict(width=64, layers=3, heads=4, kv_heads=4, mlp=256),
    mode='split',
    steps=60,
    prompts=16,
    rollouts=8,
    completion_tokens=24,
    environment=dict(
      fn='endpoint',
      harness='jaxrl_llm.environments.example_agent:guesses',
      turns=5,
      judge='environment',
      deadline_s=60.0,
      cpu_s=60.0,
    ),
    objective=dict(reward_shaping=dict(fn='none')),
    optimizer=dict(learning_rate=1e-3, decay='linear'),
    sft=dict(steps=60, learning_rate=2e-3, prompts=64),
    data=dict(
      source='games',
      size=128,
      chat=False,
      tasks=(dict(name='guess', top=12, min_span=3, max_span=15),),
    ),
    # The harness runs in training alone.
    evaluation=dict(prompts=0),
  )
