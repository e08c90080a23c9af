"""RLEP, arXiv:2507.07451: right rollouts of earlier visits to a prompt are learned again beside new ones.

python -m jaxrl_llm.main --config=rlep
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: two replays a group, clip 0.2/0.28, dual clip 10 and the token mean are the official code's; 8 new rollouts
(16 there) and at most 8 stored of a prompt are ours. The paper collects right rollouts in a run of DAPO and starts
again from the base model; here they are those of the run, so that first visits have none. The old log-probs of a
replay are those of the weights at the start of the step. Learning rate and batch are ours, for a 135M model on a
laptop.
"""


def get_config():
  return dict(
    base='dapo',
    replay=dict(reuse=dict(fn='successes', count=2, keep=8)),
    objective=dict(trust_region=dict(fn='dual_clip', low=0.2, high=0.28, most=10.0)),
  )
