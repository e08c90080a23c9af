"""AsymRE, arXiv:2506.20520: a baseline a little below the mean, so that failures count for less off-policy.

python -m jaxrl_llm.main --config=configs/asym_re.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the shift of −0.1 is the paper's (read in Trinity's code). Two minibatches per batch, so that the
policy moves away from the sampler at all: that number is ours. Learning rate and batch are ours, for a 135M
model on a laptop.
"""


def get_config():
  return dict(
    steps=60,
    updates_per_rollout=2,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='shifted', shift=-0.1),
      ratio=dict(fn='one'),
      trust=dict(fn='none'),
      aggregate=dict(fn='token_mean'),
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
