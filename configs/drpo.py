"""DRPO, arXiv:2510.04474: short right answers against a soft maximum of wrong ones, and a hinge on the drift.

python -m jaxrl_llm.main --config=configs/drpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: temperature 10, length rate 0.1, hinge 1e3 beyond 1e-4 are the official code's; max_tokens is our cap.
Two minibatches per batch, so that the policy moves away from the sampler at all: that number is ours. Learning
rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    steps=60,
    updates_per_rollout=2,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='raw', baseline=0.5),
      ratio=dict(fn='one'),
      trust=dict(fn='listwise', max_tokens=16, temperature=10.0, length_rate=0.1),
      kl=dict(fn='hinge', coef=1e3, delta=1e-4),
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
