"""ScaleRL, arXiv:2510.13786: truncated weights instead of a clip, every prompt counts the same.

python -m jaxrl_llm.main --config=configs/scale_rl.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: cap 5 (4 and 8 did as well), prompt mean and the drop of all-equal groups are the paper's (third-party
notes) and TRL's (read in code). Rewards are 0 and 1 instead of ±1; the history of prompts and the thinking
budget are not in here. Two minibatches per batch, so that the policy moves away from the sampler at all: that
number is ours. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    steps=60,
    updates_per_rollout=2,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='batch_normalized', eps=1e-4),
      ratio=dict(fn='direct'),
      trust=dict(fn='cap', most=5.0),
      aggregate=dict(fn='prompt_mean'),
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
