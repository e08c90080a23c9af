"""DeepSeek-V3.2, arXiv:2512.02556: drops wrong answers that became unlikely under the policy; an unbiased KL term.

python -m jaxrl_llm.main --config=deepseek_v32
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: delta 1e-4 is slime's (read in code); the KL coefficient 0.001 is ours. Two minibatches per batch are ours;
with one, every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      importance_correction=dict(fn='divergent_negatives', delta=1e-4),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      kl=dict(fn='ratio_k3', coef=0.001),
    ),
  )
