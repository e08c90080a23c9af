"""OTR, arXiv:2509.26313: every token of a demonstration is an episode of its own, worth 1 if sampled and less if not.

python -m jaxrl_llm.main --config=otr
Numbers: −0.1 for a wrong token is from memory, as is that 256 tokens are drawn at each position; here it is their mean
over all draws, exactly. The paper learns from demonstrations alone: two rollouts of each prompt only tell how hard it
is. Batch and learning rate are ours. Demonstrations of the default job are its answers, a bare number each:
--config.data.source=jsonl with a column `solution` brings better ones.
"""


def get_config():
  return dict(
    base='sums',
    prompts=16,
    rollouts=2,
    objective=dict(sft_loss=dict(fn='one_token_rollouts', beta=-0.1)),
  )
