"""PEAR, arXiv:2602.01058: a demonstrated token is weighted by the policy's probability of its continuation.

python -m jaxrl_llm.main --config=pear
Numbers: discount 0.999, log-ratios clipped to −0.08 and 0.3, and weights to 0.1 and 10 are from third-party notes, as
is the formula (the token variant); the paper's were not read. A column `logprobs` holds the log-probs of the
demonstration's author; rows without one, and all of the default job's, are compared with the first weights. The paper
learns from demonstrations alone: the two rollouts of each prompt only estimate its difficulty. Batch and learning
rate are ours. Demonstrations of the default job are its answers, a bare number each.
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
