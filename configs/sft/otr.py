"""OTR, arXiv:2509.26313: each token of a demonstration is an episode: reward 1 if sampled, else less.

python -m jaxrl_llm.main --config=otr
Numbers: −0.1 for a wrong token is from memory, as are 256 tokens sampled at each position; here it is the exact mean
over all samples. The paper learns from demonstrations alone: the two rollouts of each prompt only estimate its
difficulty. Batch and learning rate are ours. Demonstrations of the default job are its answers, a bare number each;
--config.data.source=jsonl with a column `solution` gives better ones.
"""


def get_config():
  return dict(
    base='sums',
    prompts=16,
    rollouts=2,
    objective=dict(sft_loss=dict(fn='one_token_rollouts', beta=-0.1)),
  )
