"""GRPO-λ, arXiv:2505.18086: right answers are to be short, but only to prompts that most rollouts solve.

python -m jaxrl_llm.main --config=grpo_lambda
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: from third-party notes: the fifth of a batch's groups with most right answers is penalised, by 0.6 times the
sigmoid of the standardised length (a re-implementation's 0.6); the paper itself was not read, its abstract tells the
switch alone. With 4 prompts a step the fifth is one group, and all that are as right. Learning rate and batch are
ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(reward_shaping=dict(fn='brief_where_solved', share=0.2, factor=0.6)),
  )
