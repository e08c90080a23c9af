"""Dr.GRPO, arXiv:2503.20783: no division by the group's deviation nor by an answer's length.

python -m jaxrl_llm.main --config=configs/dr_grpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: no KL term and 8 rollouts are the official script's (read in code); the denominator is the cap on
tokens, 3000 there, ours here. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    steps=60,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='group_centered'),
      aggregate=dict(fn='fixed'),
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
