"""BroRL, arXiv:2510.01180: 512 rollouts of each prompt, so that little of what the policy might say goes unsampled.

python -m jaxrl_llm.main --config=bro_rl
Numbers: 512 rollouts are the paper's; one prompt a step and 64 rows that decode at once are ours, for a laptop. A step
needs the memory of 64 rows: the others wait for a slot, and the update accumulates microbatches. The objective is that
of dapo.py, whose wider upper clip and mixed groups the paper takes over from ProRL.
"""


def get_config():
  return dict(base='dapo', prompts=1, rollouts=512, rollout=dict(slots=64))
