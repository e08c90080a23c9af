"""The default job: SmolLM2-135M-Instruct on short sums. Most other configs change how it is learned.

python -m jaxrl_llm.main --config=sums         (GRPO, the default objective)
Numbers: ours, for a 135M model on a laptop: a quarter of an hour on two cores.
"""


def get_config():
  return dict(
    steps=60,
    prompt_tokens=56,
    completion_tokens=16,
    optimizer=dict(learning_rate=1e-5, decay='linear'),
    rewards=dict(fn='number', workers=2, deadline_s=10.0),
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
