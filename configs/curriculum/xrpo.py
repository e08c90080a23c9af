"""XRPO, arXiv:2510.06672: a bonus for right answers that the policy finds unlikely.

python -m jaxrl_llm.main --config=xrpo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: strength and bound of 1 are from third-party notes, as are rollouts for prompts with an uncertain mean and a
solved example in front of prompts that no rollout solved; confidence 0.95 is ours. Slots of 2 rollouts, 4 slots a
prompt on average, learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    prompts=16,
    rollouts=2,
    prompt_tokens=112,
    curriculum=dict(
      hint=dict(fn='exemplars', after=1),
      slots_per_prompt=4,
      allocation=dict(fn='xrpo', confidence=0.95, bonus=1.0),
    ),
    objective=dict(
      token_weighting=dict(fn='sharpen', strength=1.0, most=1.0),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
    ),
  )
