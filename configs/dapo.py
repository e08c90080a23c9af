"""DAPO, arXiv:2503.14476: clip-higher, token-mean loss, soft overlong penalty in tokens, mixed groups only.

python -m jaxrl_llm.main --config=configs/dapo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2/0.28, token-mean and the shape of the overlong penalty are the paper's; its buffer (4096 of
20480 tokens there) is scaled to our cap, its factor is halved; where the paper draws more groups until
enough are mixed, the curriculum here chooses prompts that are likely to be, and all-equal groups leave loss
and denominator. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    steps=60,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      trust=dict(fn='clip', low=0.2, high=0.28),
      aggregate=dict(fn='token_mean'),
      shape=dict(fn='overlong', buffer_tokens=4, factor=0.5),
      zero_variance=dict(fn='mask'),
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
