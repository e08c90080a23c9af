"""RED-Weight ("GRPO is secretly off-policy"), arXiv:2509.24203: good answers count exponentially more.

python -m jaxrl_llm.main --config=red_weight
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the temperature 1 and no ratio are the authors' recipe in Trinity-RFT. Two minibatches per batch are ours; with
one, every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='exp_weighted', temperature=1.0),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
    ),
  )
