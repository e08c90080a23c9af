"""RL after SFT, arXiv:2509.25123: functions learned on five letters (configs/sft/sft.py), then longer strings.

python -m jaxrl_llm.main --config=sft
python -m jaxrl_llm.main --config=sft --mode=export --to=runs/sft_model
python -m jaxrl_llm.main --config=sft_then_rl
No demonstration has six or seven letters: only rewards show which answers are right. Numbers: ours, not tuned; the
functions are the paper's idea. Its own extension, from f(x) to f(g(x)) (max_depth=2), did not work with this model,
which answers without intermediate results. DAPO, with a curriculum that separates lengths.
"""


def get_config():
  return dict(
    base='sft',
    model='runs/sft_model',
    steps=120,
    prompts=64,
    rollouts=8,
    objective=dict(
      trust_region=dict(fn='clip', low=0.2, high=0.28),
      aggregation=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
    ),
    optimizer=dict(learning_rate=3e-4, decay='linear'),
    sft=dict(steps=0),
    data=dict(tasks=(dict(name='compose', max_depth=1, min_length=5, max_length=7),)),
    evaluation=dict(every=40),
    checkpoint=dict(every=40, keep=2),
  )
