"""Sol-RL, arXiv:2604.06916: many rollouts of rounded weights; the best and the worst are learned in full precision.

python -m jaxrl_llm.main --config=sol_rl
Default job: SmolLM2-135M-Instruct on short sums.
Written for images: there the noise decides the picture, and the chosen ones are made again from the same noise without
rounding. A text drawn again would soon be another one. Here the update scores the chosen texts with unrounded weights,
and each token is corrected by π / π_b, at most 2: ours, as is the choice by one reward.
Numbers: a quarter of the rollouts, half of them the best, as there (24 of 96, in 4 bits). 16 rollouts, 8 bits, and all
other settings are those of dapo.py or ours.
"""


def get_config():
  return dict(
    base='dapo',
    rollouts=16,
    rollout=dict(weights_dtype='int8'),
    replay=dict(reuse=dict(fn='extremes', best=2, worst=2)),
    objective=dict(importance_correction=dict(fn='token_truncate', high=2.0)),
  )
