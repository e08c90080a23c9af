"""AIPO (LlamaRL), arXiv:2505.24034: importance weights of old rollouts are bounded from above, and nothing is clipped.

python -m jaxrl_llm.main --config=aipo
Numbers: the bound of 5 is ours; the formula is that of prime-rl's documentation, which names LlamaRL, without entropy
and KL terms. LlamaRL samples on devices of its own while the trainer learns. One program has rollouts as old by
stopping when half of the groups are complete: the others continue with newer weights and are learned up to
rollout.max_age=4 updates after their first token; mode=lag adds one. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    prompts=8,
    rollout=dict(stop=dict(fn='groups', fraction=0.5), max_age=4),
    objective=dict(
      ratio=dict(fn='direct'),
      trust_region=dict(fn='cap', most=5.0),
    ),
  )
