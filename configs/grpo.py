"""GRPO, arXiv:2402.03300: DeepSeekMath's group-relative policy optimization.

python -m jaxrl_llm.main --config=grpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 and group-normalized advantages are the paper's. The KL term is left out, as in most later recipes.
Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='sequence_mean'),
    ),
  )
