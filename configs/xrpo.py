"""XRPO, arXiv:2510.06672: a bonus for right answers that the policy finds unlikely.

python -m jaxrl_llm.main --config=configs/xrpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: strength and bound of 1 are from third-party notes; its allocation of rollouts is not in here. Learning
rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    steps=60,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      emphasis=dict(fn='sharpen', strength=1.0, most=1.0),
      trust=dict(fn='clip', low=0.2, high=0.2),
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
