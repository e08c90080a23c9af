"""PRIME, arXiv:2502.01456: token rewards are log-ratios of a model that learns to separate right from wrong answers.

python -m jaxrl_llm.main --config=prime
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: beta 0.05, cross-entropy, equal weights of process and outcome, process rewards divided by the batch's
largest reward-to-go, and a reward model that is trained before it scores, with twice the policy's learning rate (1e-6
and 5e-7), are the official code's. Groups of 8 (not 4, filtered by accuracy), learning rates and batch are ours, for
a 135M model on a laptop. It holds three models in memory: a reference is kept, too.
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
