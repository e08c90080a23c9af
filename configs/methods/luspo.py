"""LUSPO, arXiv:2602.05261: GSPO as a sum over tokens, without the bias to short answers.

python -m jaxrl_llm.main --config=luspo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the sum is TRL's (read in code); the clip is GSPO's, not checked against the paper. Learning rate and batch
are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=4),
    objective=dict(
      ratio=dict(fn='sequence'),
      trust_region=dict(fn='clip', low=3e-4, high=4e-4),
      aggregation=dict(fn='sequence_sum'),
    ),
  )
