"""BEPA, arXiv:2601.05787: unsolved prompts are solved once with the expert's demonstration, and then injected.

python -m jaxrl_llm.main --config=bepa
Default job: SmolLM2-135M-Instruct on short sums, whose demonstrations are the answers; a column `solution` is better.
Numbers: reconstructed from the abstract and the project page; no training code is public. Level 1: an expert's trace
becomes a plan, the policy acts by it, and what succeeds fills a cache of one trajectory a task. The paper does so once
before training, here it is the visit after an all-wrong group, and the demonstration itself is the plan; such a group
is not learned. Level 2: in an all-wrong group the cached trajectory replaces a row, without the plan, and successes of
the policy refresh the cache. Its importance ratio, which these sources do not give, is to the weights at the start of
the step, as in RLEP. The paper trains agents of many turns, and this has one. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    prompt_tokens=96,
    curriculum=dict(hint=dict(fn='self_rolled', after=1)),
    replay=dict(reuse=dict(fn='cached')),
  )
