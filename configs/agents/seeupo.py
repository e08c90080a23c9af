"""SeeUPO, arXiv:2602.06554: one optimizer step per turn, the last turn first, each with the ratio of a sequence.

python -m jaxrl_llm.main --config=seeupo
The job is that of configs/agents/guess.py, whose model, learning rate and batch are ours.
Numbers: bounds of 0.2 on the multiplier, KL 0.002 and normalization over the batch of a turn's rows are those of the
official script. Clip 0.2 is its framework's default; with one step a turn it has no effect.
"""


def get_config():
  return dict(
    base='guess',
    optimizer=dict(outer=dict(fn='last_turn_first', eps=0.2)),
    objective=dict(
      advantage=dict(fn='raw'),
      credit_assignment=dict(fn='turn_whitened'),
      ratio=dict(fn='sequence'),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      kl=dict(fn='k3', coef=0.002),
      aggregation=dict(fn='sequence_mean'),
      zero_variance=dict(fn='keep'),
    ),
  )
