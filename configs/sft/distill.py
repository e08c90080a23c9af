"""On-policy distillation (reverse KL) from a teacher in a local folder: its word on every sampled token, no rewards.

python -m jaxrl_llm.main --config=distill --config.objective.teacher=FOLDER
FOLDER is a model folder as config.model takes it, of the same vocabulary: a larger one of the family, or what
--mode=export wrote. A = log π_T − log π of each token that the student sampled, whose gradient is that of −KL(π ‖ π_T)
token by token: exopd.py with scale 1, where the base cancels. Numbers: exopd.py's. Grades only steer the choice of
prompts and the evaluation.
"""


def get_config():
  return dict(
    base='exopd',
    objective=dict(distillation=dict(fn='on_policy', scale=1.0), teacher='runs/teacher'),
  )
