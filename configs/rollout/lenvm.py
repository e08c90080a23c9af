"""LenVM, arXiv:2604.27039: a head predicts the length of rollouts from their prompt; the longest begin first.

python -m jaxrl_llm.main --config=lenvm --config.rollout.slots=16
The order counts with fewer slots than rollouts. Without, the head learns and is logged.
Numbers: the paper's discount is 0.997 for completions of up to about 1,000 tokens; left at 0 it is scaled to our cap.
Learning rate and width are ours, since the paper trains a whole model for all tokens, and this is a head that reads the
ends of prompts. That the prediction orders the queue is ours, too. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    rollout=dict(
      length_head=dict(fn='discounted_return'),
      queue_order=dict(fn='longest_first'),
    ),
  )
