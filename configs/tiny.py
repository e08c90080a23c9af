"""A character-level transformer of about a million parameters, trained from scratch on tasks with digits.

python -m jaxrl_llm.main --config=tiny
A supervised warm start through the same update, then DAPO. Tests and studies over many seeds use it.
"""


def get_config():
  return dict(
    model='scratch',
    steps=90,
    prompts=64,
    rollouts=8,
    prompt_tokens=16,
    completion_tokens=10,
    objective=dict(
      trust_region=dict(fn='clip', low=0.2, high=0.28),
      aggregation=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
    ),
    optimizer=dict(learning_rate=3e-4, decay='linear'),
    rewards=dict(fn='exact', workers=2, deadline_s=10.0),
    sft=dict(steps=150, learning_rate=2e-3, prompts=64),
    data=dict(
      source='digits',
      # Far more than are seen: with 2048 the warm start learns the prompts by heart, and RL then only unlearns.
      size=20000,
      chat=False,
      tasks=(
        dict(name='rev', min_length=1, max_length=8),
        dict(name='sort', min_length=1, max_length=8),
      ),
    ),
    evaluation=dict(every=30),
    checkpoint=dict(every=45, keep=2),
  )
