"""ADHint, arXiv:2512.13095: the harder a prompt was, the more of its answer is shown at the next visit.

python -m jaxrl_llm.main --config=ad_hint
Numbers: the linear share between two ends is from third-party notes; the ends and the noise are ours. The gate on the
entropy of hint tokens and the weights between hinted and plain groups are left out. All other settings are those of
dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    prompt_tokens=80,
    curriculum=dict(hint=dict(fn='by_difficulty', least=0.0, most=0.8, noise=0.1)),
  )
