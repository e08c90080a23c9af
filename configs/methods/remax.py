"""ReMax, arXiv:2310.10505: REINFORCE with the reward of a greedy answer as the baseline.

python -m jaxrl_llm.main --config=remax
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the baseline is the paper's (read in verl's code), the greedy answer is the first row of each group and leaves
the loss. The curriculum counts it as any other. The paper samples one further answer of a prompt; the number here is
that of the default job. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='greedy_baseline'),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
    ),
  )
