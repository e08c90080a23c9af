"""Rubrics with a judge: every row has criteria for good and bad completions, each worth points.

python -m jaxrl_llm.main --config=rubric --config.rewards.model=NAME          (from the repository's root)
  --config.rewards.base_url=https://host/v1 --config.rewards.key_env=JUDGE_KEY   (any chat-completions server; the
  key is in that environment variable, and in no file)
Rows are configs/rewards/rubric.jsonl: a prompt and a `rubric`, a list of {criterion, points} with points below 0 for
faults, as in HealthBench. The judge reasons about each criterion by itself and answers met or not; the reward is the
points of those met, divided by all positive points. With four to five requests a completion and 32 completions a
step, mind the cost (most_requests, most_tokens) and the rate (per_minute). Verdicts are stored in `cache`, so that a
resumed run does not repeat requests. A completion without a verdict is a failure, not a 0: it is counted and dropped,
and the run ends where most completions fail. Repetition costs up to half a point, whatever the verdicts.
The same criteria for all rows: --config.rewards.row_criteria=False --config.rewards.criteria="{'is brief': 1.0}";
each of them can be logged by its own part without another request (see `only` in rewards/model_judge/rubric.py).
  --config.rewards.fn=steps    judges reasoning step by step instead (configs/rewards/stepwiser.py)
  --config.rewards.fn=pairwise compares the completions of a prompt with each other (configs/rewards/openrs.py)
Numbers: ours, a starting point, not tuned, and not run with a model as judge. A completion counts as right, for
curriculum and log, from 0.7 up. Evaluation uses the judge, too: 3 prompts, 2 + 1 completions each.
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
