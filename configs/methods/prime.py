"""PRIME, arXiv:2502.01456: a model that learns right from wrong answers rewards every token by its log-ratio.

python -m jaxrl_llm.main --config=prime
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: beta 0.05, cross-entropy, equal weights of process and outcome, process rewards divided by the batch's largest
reward-to-go, and that the reward model learns twice as fast as the policy and before it rewards (1e-6 and 5e-7) are of
the official code. Groups of 8 (not 4, filtered by accuracy) are ours, as are learning rates and batch, for a 135M model
on a laptop. Memory for three models: a reference is kept too.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='leave_one_out'),
      credit_assignment=dict(fn='process', process=1.0, outcome=1.0),
      auxiliary_model=dict(fn='outcome', learning_rate=2e-5, beta=0.05),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
