"""SAPO, arXiv:2511.20347: a sigmoid of the ratio instead of the clip.

python -m jaxrl_llm.main --config=sapo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: temperatures 1 and 1.05 are TRL's defaults (read in code). Two minibatches per batch are ours; with one,
every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      trust_region=dict(fn='sigmoid', temperature=1.0, temperature_negative=1.05),
      aggregation=dict(fn='sequence_mean'),
    ),
  )
