"""GRPO-λ, arXiv:2505.18086: right answers are rewarded for being short, but only to prompts that most rollouts solve.

python -m jaxrl_llm.main --config=grpo_lambda
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: from third-party notes: the fifth of a batch's groups with the most right answers is penalized, by 0.6 times
the sigmoid of the standardized length (0.6 is of a re-implementation). The paper itself was not read; its abstract
describes only the switch. With 4 prompts a step the fifth is one group, and all with equally many right answers.
Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(reward_shaping=dict(fn='brief_where_solved', share=0.2, factor=0.6)),
  )
