"""ADHint, arXiv:2512.13095: the harder a prompt was, the more of its answer is shown at the next visit.

python -m jaxrl_llm.main --config=ad_hint
Numbers: the line between two shares is from third-party notes, its ends and noise are ours. The gate on the entropy
of hint tokens and the weights between hinted and plain groups are not in here. All else is dapo.py's.
"""


def get_config():
  return dict(
    base='dapo',
    prompt_tokens=80,
    curriculum=dict(hint=dict(fn='by_difficulty', least=0.0, most=0.8, noise=0.1)),
  )
