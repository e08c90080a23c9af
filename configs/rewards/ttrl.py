"""TTRL, arXiv:2504.16084: the answer that most of a group give is the right one; no label is learned from.

python -m jaxrl_llm.main --config=ttrl
Default job: SmolLM2-135M-Instruct on short sums; critic/vote_accuracy says how often the vote is right.
Numbers: twice as many vote as are learned from, as in the official code (64 and 32); 16 and 8 are ours, as is the rule
for ties, the answer given first. Its KL to the first policy is left out, its clip is GRPO's. Learning rate and batch
are ours, for a 135M model on a laptop. A model that is mostly wrong votes itself further away: start from one that is
not.
"""


def get_config():
  return dict(
    base='sums',
    rollouts=16,
    rewards=dict(vote=dict(fn='majority', learn_from=8)),
    objective=dict(aggregation=dict(fn='token_mean')),
  )
