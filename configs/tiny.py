"""A character-level transformer of about a million parameters on tasks with digits, made from scratch.

python -m jaxrl_llm.main --config=configs/tiny.py
A supervised warm start through the same update, then DAPO. What tests and many-seed studies run on.
"""


def get_config():
  return dict(
    model='scratch',
    steps=120,
    prompts=16,
    rollouts=8,
    prompt_tokens=16,
    completion_tokens=10,
    objective=dict(
      trust=dict(fn='clip', low=0.2, high=0.28),
      aggregate=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
    ),
    optimizer=dict(learning_rate=3e-4),
    grade=dict(fn='exact', workers=2, deadline_s=10.0),
    sft=dict(steps=300, learning_rate=2e-3, prompts=64),
    data=dict(
      source='digits',
      size=2048,
      chat=False,
      tasks=(
        dict(name='rev', min_length=1, max_length=8),
        dict(name='sort', min_length=1, max_length=8),
      ),
    ),
    checkpoint=dict(every=60, keep=2),
  )
