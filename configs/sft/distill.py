"""On-policy distillation (reverse KL) from a teacher in a local folder: its log-probs of sampled tokens, no rewards.

python -m jaxrl_llm.main --config=distill --config.objective.teacher=FOLDER
FOLDER is a model folder as config.model takes it, with the same vocabulary: a larger model of the family, or one
written by --mode=export. A = log π_T − log π of each token that the student sampled, whose gradient is that of −KL(π
‖ π_T) token by token: exopd.py with scale 1, where the base cancels. Numbers: those of exopd.py. Rewards affect only
the choice of prompts and the evaluation.
"""


def get_config():
  return dict(
    base='exopd',
    objective=dict(distillation=dict(fn='on_policy', scale=1.0), teacher='runs/teacher'),
  )
