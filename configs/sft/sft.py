"""Supervised fine-tuning alone: a character model from scratch learns twelve string functions.

python -m jaxrl_llm.main --config=sft
python -m jaxrl_llm.main --config=sft --mode=export --to=runs/sft_model        (for configs/sft/sft_then_rl.py)
Rows are f3(abc)= with their value. Of your own file (--config.data.source=jsonl --config.data.path=rows.jsonl) a
row's `solution` or `response` is learned, else its answer. Numbers: ours, not tuned. steps=0: only the supervised
start, whose checkpoint is of step 0.
"""


def get_config():
  return dict(
    model='scratch',
    steps=0,
    prompt_tokens=24,
    completion_tokens=24,
    rewards=dict(fn='exact', workers=2, deadline_s=10.0),
    sft=dict(steps=600, learning_rate=2e-3, prompts=96),
    data=dict(
      source='puzzles',
      size=20000,
      chat=False,
      tasks=(dict(name='compose', max_depth=1, min_length=2, max_length=5),),
    ),
  )
