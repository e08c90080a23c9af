"""ScaleRL, arXiv:2510.13786: truncated importance weights instead of a clip; every prompt has the same weight.

python -m jaxrl_llm.main --config=scale_rl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: cap 5 (4 and 8 worked as well), the prompt mean and the drop of zero-variance groups are the paper's
(third-party notes) and TRL's (read in code). Prompts come in a shuffled stream; one with a success rate of 0.9 over
at least two visits returns only in an audit. The visits and the audits are ours. Rewards are 0 and 1 instead of ±1;
the thinking budget is left out. Two minibatches per batch are ours; with one, every ratio is 1. Learning rate and
batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='batch_normalized', eps=1e-4),
      ratio=dict(fn='direct'),
      trust_region=dict(fn='cap', most=5.0),
      aggregation=dict(fn='prompt_mean'),
      zero_variance=dict(fn='mask'),
    ),
    curriculum=dict(
      candidates=dict(fn='stream', multiple=2),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      rate_estimate=dict(fn='mean'),
      utility=dict(fn='uniform'),
      selection=dict(fn='skip'),
      eligibility=dict(fn='retire', rate=0.9, visits=2),
    ),
  )
