"""Sums with a calculator: a turn may call <calc>…</calc> and gets its value; a turn without a call is the answer.

python -m jaxrl_llm.main --config=calculator
Numbers: ours, a starting point, not tuned: GRPO as in sums.py on larger sums, three turns in 96 tokens. A turn ends
at </calc>, or with the model's own end token.
"""


def get_config():
  return dict(
    base='sums',
    mode='split',
    prompt_tokens=112,
    completion_tokens=96,
    rollout=dict(early_exit=dict(fn='text', text='</calc>')),
    environment=dict(fn='calculator', turns=3, judge='rewards', weight=0.0, observation_tokens=16),
    data=dict(
      template='{question} You may call a calculator: <calc>12+30</calc>. Then answer with the number alone.',
      tasks=tuple(
        dict(
          name='basic_arithmetic',
          size=size,
          operators=('+', '*'),
          allow_parentheses=False,
          allow_negation=False,
          min_terms=terms,
          max_terms=terms,
          min_digits=digits,
          max_digits=digits,
        )
        for terms, digits, size in ((2, 2, 300), (3, 2, 300), (2, 3, 300))
      ),
    ),
  )
