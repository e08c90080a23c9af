"""RL after SFT: a model that knows single string functions (configs/sft.py) learns to compose them, arXiv:2509.25123.

python -m jaxrl_llm.main --config=configs/sft.py
python -m jaxrl_llm.main --config=configs/sft.py --mode=export --to=runs/sft_model
python -m jaxrl_llm.main --config=configs/sft_then_rl.py
No composition is ever shown: rewards alone say which are right. Numbers: ours, not tuned; the task is the paper's, its
functions and the size of the model are not. DAPO, and the curriculum, which tells depths and lengths apart.
"""


def get_config():
  return dict(
    base='sft.py',
    model='runs/sft_model',
    steps=120,
    prompts=64,
    rollouts=8,
    objective=dict(
      trust=dict(fn='clip', low=0.2, high=0.28),
      aggregate=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
    ),
    optimizer=dict(learning_rate=3e-4, decay='linear'),
    sft=dict(steps=0),
    data=dict(tasks=(dict(name='compose', min_depth=1, max_depth=2, min_length=2, max_length=5),)),
    eval=dict(every=40),
    checkpoint=dict(every=40, keep=2),
  )
