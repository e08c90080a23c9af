"""ADORA, arXiv:2602.10019: groups whose right answers are short count for a tenth.

python -m jaxrl_llm.main --config=adora
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the weight 0.1, its condition, and the limit of 4,054 tokens above which a wrong answer is left out of it are
the official code's, whose reward and cap differ. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='adora', weak=0.1),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
