"""RED-Drop ("GRPO is secretly off-policy"), arXiv:2509.24203: drops wrong answers beyond the number of right ones.

python -m jaxrl_llm.main --config=red_drop
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the method has none. The authors' recipe in Trinity-RFT drops rows at random; the advantages here are the mean
over all such draws, which has the same expected gradient and less noise. Two minibatches per batch are ours; with
one, every ratio is 1. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='balanced'),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
    ),
  )
