"""GDPO, arXiv:2601.05242: each of several rewards is normalized within its group before they are added.

python -m jaxrl_llm.main --config=gdpo
Default job: SmolLM2-135M-Instruct on short sums. critic/score/number and critic/score/bare_number are its two
rewards.
Numbers: the two normalizations and their epsilon 1e-4 are those of the code in TRL and verl. The rewards and their
equal weights are ours: the right number, and a completion that is only a number. Clip 0.2 and the mean over sequences
are GRPO's. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    rewards=dict(parts=(dict(fn='bare_number', weight=1.0),)),
    objective=dict(
      advantage=dict(fn='decoupled', eps=1e-4),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='sequence_mean'),
    ),
  )
