"""PEAR, arXiv:2602.01058: a demonstrated token counts for as much as the policy would say what follows it.

python -m jaxrl_llm.main --config=pear
Numbers: discount 0.999, log-ratios clipped to −0.08 and 0.3, weights to 0.1 and 10 are from third-party notes, as is
the formula (the variant for tokens); the paper's were not read. A column `logprobs` holds what the writer of a
demonstration thought of its tokens; rows without one, and all of the default job's, are compared with the weights as
they began. The paper learns from demonstrations alone: two rollouts of each prompt only tell how hard it is. Batch and
learning rate are ours. Demonstrations of the default job are its answers, a bare number each.
"""


def get_config():
  return dict(
    base='sums',
    prompts=16,
    rollouts=2,
    objective=dict(
      sft_loss=dict(
        fn='suffix_weighted', discount=0.999, low=-0.08, high=0.3, least=0.1, most=10.0
      ),
    ),
  )
