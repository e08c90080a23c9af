"""LenVM, arXiv:2604.27039: a head predicts the length of rollouts from their prompt; the longest begin first.

python -m jaxrl_llm.main --config=lenvm --config.rollout.slots=16
The order counts with fewer slots than rollouts. Without, the head learns and is logged.
Numbers: the paper's discount is 0.997 for Qwen2.5 and 0.9998 for Qwen3; ours is 1 - 1 / completion_tokens, for our
short ones. Learning rate and width are ours, since the paper trains a whole model for all tokens, and this is a head
that reads the ends of prompts. That its prediction orders the queue is ours, too. All other settings are those of
dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    rollout=dict(
      length_head=dict(fn='discounted_return'),
      queue_order=dict(fn='longest_first'),
    ),
  )
