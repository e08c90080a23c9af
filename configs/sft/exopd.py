"""ExOPD, arXiv:2602.12125: the reward of a sampled token is 1.25 times its log-probability under a teacher.

python -m jaxrl_llm.main --config=exopd
It downloads the teacher from the hub; a model folder on disk works as well: --config.objective.teacher=FOLDER.
Numbers: scale 1.25 (1 is plain on-policy distillation), one rollout a prompt and importance weights of the sampler
capped at 5 are the official code's, read for our notes; its batch of 1024 prompts is 32 here. The teacher is ours, of
the default model's family, so that both have the same tokens. Rewards affect only the choice of prompts and the
evaluation.
"""


def get_config():
  return dict(
    base='sums',
    prompts=32,
    rollouts=1,
    objective=dict(
      advantage=dict(fn='raw', baseline=0.0),
      importance_correction=dict(fn='token_truncate', low=0.0, high=5.0),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
      distillation=dict(fn='on_policy', scale=1.25),
      teacher='HuggingFaceTB/SmolLM2-360M-Instruct',
    ),
  )
