"""GRPO, arXiv:2402.03300: DeepSeekMath's group-relative policy optimisation.

python -m jaxrl_llm.main --config=configs/grpo.py
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 and group-normalised advantages are the paper's; the KL term is left out, as most later
recipes do; learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    steps=75,
    prompt_tokens=56,
    completion_tokens=16,
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      trust=dict(fn='clip', low=0.2, high=0.2),
      aggregate=dict(fn='sequence_mean'),
    ),
    optimizer=dict(learning_rate=1e-5),
    grade=dict(fn='number', workers=2, deadline_s=10.0),
    # From what the model often solves to what it never does: (terms, digits).
    data=dict(
      source='gym',
      tasks=(
        dict(name='chain_sum', size=100, min_terms=2, max_terms=2, min_digits=1, max_digits=1),
        dict(name='chain_sum', size=300, min_terms=3, max_terms=3, min_digits=1, max_digits=1),
        dict(name='chain_sum', size=300, min_terms=2, max_terms=2, min_digits=2, max_digits=2),
        dict(name='chain_sum', size=300, min_terms=2, max_terms=2, min_digits=3, max_digits=3),
      ),
    ),
  )
