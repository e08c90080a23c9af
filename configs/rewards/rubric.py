"""Rubrics before a judge: every row says what a good reply does and what a bad one does, each worth points.

python -m jaxrl_llm.main --config=rubric --config.rewards.model=NAME          (from the repository's root)
  --config.rewards.base_url=https://host/v1 --config.rewards.key_env=JUDGE_KEY   (any chat-completions server; the key is
                                                          in that variable of the environment, and in no file)
Rows are configs/rewards/rubric.jsonl: a prompt and a `rubric`, a list of {criterion, points}, points below 0 for faults, as
HealthBench has them. The judge is asked about each criterion by itself, reasons, and says met or not; the reward is the
points of those that are met over all that can be earned. Here four to five questions a reply, 32 replies a step: mind
the bill (most_requests, most_tokens) and the rate (per_minute). Answers are kept in `cache`, so that a run that is
resumed does not pay twice. What the judge cannot be brought to say is a failure and never a 0: it is counted, dropped,
and ends the run where it is most of the replies. Repetition costs up to half a point whatever the judge says.
The same criteria for all rows: --config.rewards.row_criteria=False --config.rewards.criteria="{'is brief': 1.0}"; of
these each can be logged by a part of its own, at no further question (see `only` in rewards/model_judge/rubric.py).
  --config.rewards.fn=steps    judges reasoning step by step instead (configs/rewards/stepwiser.py)
  --config.rewards.fn=pairwise compares the replies to a prompt with each other (configs/rewards/openrs.py)
Numbers: ours, a job to begin from, not tuned, and not run with a judge that is a model. "Right", which curriculum and
log know, is from 0.7 up. Evaluation asks the judge, too: 3 prompts, 2 + 1 replies each.
"""


def get_config():
  return dict(
    mode='lag',
    steps=60,
    prompts=4,
    rollouts=8,
    prompt_tokens=64,
    completion_tokens=192,
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      trust_region=dict(fn='clip', low=0.2, high=0.28),
      kl=dict(fn='k3', coef=0.01),
      aggregation=dict(fn='token_mean'),
    ),
    optimizer=dict(learning_rate=1e-6),
    rewards=dict(
      fn='rubric',
      row_criteria=True,
      base_url='http://localhost:8000/v1',
      model='judge',
      cache='runs/judge.sqlite',
      give_up_s=300.0,
      right=0.7,
      workers=8,
      deadline_s=330.0,
      failed=dict(timeout='drop'),  # the judge's doing and not the text's
      parts=(dict(fn='repetition', weight=-0.5),),
    ),
    data=dict(source='jsonl', path='configs/rewards/rubric.jsonl', answers=False),
    evaluation=dict(prompts=3, samples=2),
  )
