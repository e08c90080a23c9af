"""OPSD, arXiv:2601.18734: the policy learns from its first weights, which read the answer of the data.

python -m jaxrl_llm.main --config=opsd
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the objective of sampled tokens, a teacher of the first weights that reads the data's solution, and a rollout a
prompt are the official code's. Its default objective is a divergence over the whole vocabulary. It samples at
temperature 1.1 with top-p and top-k; here these are 1 and off. The words around a solution, learning rate and batch are
ours, for a 135M model on a laptop. Rewards affect only the choice of prompts and the evaluation.
"""


def get_config():
  return dict(
    base='sums',
    prompts=32,
    rollouts=1,
    objective=dict(
      advantage=dict(fn='raw', baseline=0.0),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
      distillation=dict(fn='solved_by_data', prompt_tokens=112),
    ),
  )
