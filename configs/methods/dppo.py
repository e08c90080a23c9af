"""DPPO, arXiv:2602.04879: drops tokens whose probability moved too far, whatever their ratio.

python -m jaxrl_llm.main --config=dppo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the test and the bound of 20 on the ratio are prime-rl's (read in code); delta 0.2 is ours. `binary_kl` is
the other test. Two minibatches per batch are ours; with one, every ratio is 1. Learning rate and batch are ours, for
a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='group_centered'),
      ratio=dict(fn='direct'),
      trust_region=dict(fn='total_variation', delta=0.2, most=20.0),
      aggregation=dict(fn='token_mean'),
    ),
  )
