"""DOTS's rollout replay, arXiv:2506.05316: half of a batch are mixed groups of recent steps, sampled once.

python -m jaxrl_llm.main --config=dots_replay
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: a share of 0.5, the ratio to the weights that sampled a token and clip 0.2 around that of the old policy are
the official code's. It replays from the last 512 groups, mixed or not, of which a batch takes 256; here they are mixed
and at most 4 steps old. Two minibatches per batch (8 there) are ours, and so is the number of prompts, of which as
many are replayed as sampled. The paper's choice of prompts is dots.py. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    replay=dict(reuse=dict(fn='mixed_groups', share=0.5, max_age=4)),
    learner=dict(minibatches=2),
    objective=dict(
      importance_correction=dict(fn='token'),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
    ),
  )
