"""The mixture: short questions of many kinds from one file, which holds question, answer and source alone.

python -m tests.bench.mixture_rows               (in a checkout; writes data/mixture, 20,000 rows of reasoning-gym)
python -m jaxrl_llm.main --config=mixture
Data as people have it: the rows hold no setting, level or metadata of a generator, so that the kind of a prompt is its
source and its length. Known answers tell more, and the curriculum is that of answer_odds.py. Numbers are graded by
value, other answers word for word; held-out accuracies are reported for each source.
`python -m tests.bench.choices --job=mixture` compares rules to choose prompts on it.
Numbers: those of dapo.py, for SmolLM2-135M-Instruct on a laptop, with longer prompts. As it is, 3 % of the model's
answers are right, and those to 10 of the 17 sources never; a supervised start on 960 rows teaches it their form.
"""


def get_config():
  return dict(
    base='answer_odds',
    prompt_tokens=160,
    completion_tokens=16,
    rewards=dict(fn='short_answer'),
    sft=dict(steps=60, learning_rate=3e-5, prompts=16),
    data=dict(
      source='jsonl',
      path='data/mixture/rows.jsonl',
      eval_path='data/mixture/held_out.jsonl',
      columns=dict(source='source'),
      template='{question}\nReply with the answer alone.',
    ),
    evaluation=dict(prompts=340),
  )
