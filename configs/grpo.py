"""GRPO, arXiv:2402.03300: DeepSeekMath's group-relative policy optimisation.

python -m jaxrl_llm.main --config=configs/grpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 and group-normalised advantages are the paper's; the KL term is left out, as most later
recipes do; learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    steps=60,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
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
