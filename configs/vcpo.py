"""VCPO, arXiv:2602.17616: ratios of whole answers, and a learning rate that falls with the effective sample size.

python -m jaxrl_llm.main --config=configs/vcpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: cap 8 and base 1 are the official code's. Its baseline of least variance needs a gradient norm per
answer and is not in here: the group's mean stands for it. Two minibatches per batch, so that the policy moves
away from the sampler at all: that number is ours. Learning rate and batch are ours, for a 135M model on a
laptop.
"""


def get_config():
  return dict(
    steps=60,
    updates_per_rollout=2,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='group_centered'),
      ratio=dict(fn='direct_product'),
      trust=dict(fn='cap', most=8.0),
      aggregate=dict(fn='sequence_mean'),
      lr_scale=dict(fn='effective_sample_size', most=8.0, base=1.0),
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
