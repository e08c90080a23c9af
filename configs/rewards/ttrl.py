"""TTRL, arXiv:2504.16084: the most frequent answer of a group counts as right; no label is learned from.

python -m jaxrl_llm.main --config=ttrl
Default job: SmolLM2-135M-Instruct on short sums. critic/vote_accuracy is the share of right votes.
Numbers: twice as many rollouts vote as are learned from, as in the official code (64 and 32), and of a tie the first
answer wins; 16 and 8 are ours. Its KL to the first policy and its bound of 3 on ratios of negative advantages are
left out. There a completion without an answer votes for the empty answer; here it has no vote. Learning rate and
batch are ours, for a 135M model on a laptop. The vote makes a model that is mostly wrong worse: start from one that
is mostly right.
"""


def get_config():
  return dict(
    base='sums',
    rollouts=16,
    rewards=dict(vote=dict(fn='majority', learn_from=8)),
    objective=dict(aggregation=dict(fn='token_mean')),
  )
