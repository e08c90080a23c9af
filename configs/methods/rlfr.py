"""RLFR, arXiv:2510.10201: tokens whose latents leave the flow of right answers lower the advantage before them.

python -m jaxrl_llm.main --config=rlfr
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: latents at a quarter, half and three quarters of the layers, four blocks, time 0.8, rewards of -0.01 for at
most 15 tokens a row with a deviation above 0.6 of the row's range, a flow that learns from right rows with a learning
rate of 1e-4, and the clipped loss are the official code's. Its flow begins with a run on expert data; here it learns
from the policy's right answers alone, and rewards nothing for the first 20 optimizer steps, which are ours, as learning
rate and batch are, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-9),
      credit_assignment=dict(fn='flow', coef=0.01, threshold=0.6, top=15),
      auxiliary_model=dict(
        fn='flow', learning_rate=1e-4, shares=(0.25, 0.5, 0.75), depth=4, time=0.8, after=20
      ),
      trust_region=dict(fn='dual_clip', low=0.2, high=0.2, most=3.0),
      aggregation=dict(fn='sequence_mean'),
    ),
  )
