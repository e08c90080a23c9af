"""ECHO, arXiv:2602.02150: groups branch, vote, and learn most from tokens of which the policy is uncertain.

python -m jaxrl_llm.main --config=echo
Default job: SmolLM2-135M-Instruct on short sums. critic/vote_accuracy is the share of right votes.
Numbers: advantages scaled by 0.1 (bound 2, nothing added), epsilon from 0.05 to 0.2 by the confidence of the last 16
tokens, and branches at 3.5 nats after 4 tokens are the official code's. The confidence at which a row may branch or
is dropped is ours, see rollout/tree_rules.py. All 16 rollouts vote and are learned from, as there (32). Its KL to the
first policy is left out. Learning rate and batch are ours, for a 135M model on a laptop. The vote uses no labels, as
in ttrl.py.
"""


def get_config():
  return dict(
    base='ttrl',
    rewards=dict(vote=dict(fn='majority', learn_from=0)),
    rollout=dict(tree=dict(fn='echo', depth=4, entropy=3.5, entropy_low=1.0)),
    objective=dict(
      advantage_modulation=dict(fn='unsure', multiply=0.1, add=0.0, most=2.0),
      trust_region=dict(fn='confidence_clip', base=0.05, gain=0.15, slope=4.0, tail=16),
      aggregation=dict(fn='token_mean'),
    ),
  )
