"""SDPO, arXiv:2601.20802: the policy learns from itself after it has read a right answer of the same group.

python -m jaxrl_llm.main --config=sdpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: 8 rollouts, a teacher that moves by 0.05 a step, solutions of other rows without their thinking, and importance
weights and ratios capped at 2 are the official code's. Its default loss is a divergence over the 100 likeliest tokens;
this is its other form, for the sampled tokens. Feedback of an environment is left out. The words around a solution,
learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='raw', baseline=0.0),
      importance_correction=dict(fn='token_truncate', low=0.0, high=2.0),
      trust_region=dict(fn='cap', most=2.0),
      aggregation=dict(fn='token_mean'),
      distillation=dict(fn='solved_by_group', prompt_tokens=112),
      reference=dict(fn='refreshed', every=1, mixup=0.05),
    ),
  )
