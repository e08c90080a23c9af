"""MC-GRPO, arXiv:2601.22582: the median as baseline, one rollout more than a group needs.

python -m jaxrl_llm.main --config=configs/mc_grpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: G + 1 rollouts, the median and the median deviation are the official script's (read in code). Its eps
is 1e-3; with rewards of 0 and 1 the deviation is mostly 0 and A would be 1000, so ours is 0.5. Its KL term of
0.04 and second pass are left out. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    steps=60,
    rollouts=9,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='median_centered', eps=0.5),
      trust=dict(fn='clip', low=0.2, high=0.2),
      aggregate=dict(fn='sequence_mean'),
    ),
    optimizer=dict(learning_rate=1e-5, decay='linear'),
    grade=dict(fn='number', workers=2, deadline_s=10.0),
    # From what the model sometimes solves to what it never does: (terms, digits). The easy sums are few.
    data=dict(
      source='gym',
      template='State the final answer to the following arithmetic problem: {question}',
      tasks=tuple(
        dict(
          name='basic_arithmetic',
          size=size,
          operators=('+',),
          allow_parentheses=False,
          allow_negation=False,
          min_terms=terms,
          max_terms=terms,
          min_digits=digits,
          max_digits=digits,
        )
        for terms, digits, size in ((2, 1, 60), (2, 2, 300), (3, 1, 240), (2, 3, 180))
      ),
    ),
  )
