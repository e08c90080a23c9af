"""UloRL, arXiv:2507.19766: masks the mastered tokens of right answers while entropy is low.

python -m jaxrl_llm.main --config=ulo_rl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: probability 0.99 and entropy 0.2 are the paper's; its segments are `rollout.stop.fn=rounds`. Learning rate
and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      token_weighting=dict(fn='uncertain', mastered=0.99, entropy=0.2),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
