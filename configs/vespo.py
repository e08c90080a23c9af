"""VESPO, arXiv:2602.10693: a smooth weight w^k·e^{λ(1−w)} of a whole answer's ratio.

python -m jaxrl_llm.main --config=configs/vespo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: (k, λ) = (2, 3) and (3, 2) are TRL's defaults (read in code). Two minibatches per batch, so that the
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
      ratio=dict(fn='product'),
      trust=dict(fn='gamma', power=2.0, decay=3.0, power_negative=3.0, decay_negative=2.0),
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
