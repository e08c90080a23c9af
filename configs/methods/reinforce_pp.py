"""REINFORCE++, arXiv:2501.03262: rewards minus the group's mean, whitened over all tokens of the batch.

python -m jaxrl_llm.main --config=reinforce_pp
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 and the whitening are verl's and OpenRLHF's (read in code); their KL penalty on rewards is left out.
`advantage.fn=token_whitened` is the form without groups. Learning rate and batch are ours, for a 135M model on a
laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='group_whitened'),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
