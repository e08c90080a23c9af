"""PrefixRL, arXiv:2601.18795: where nobody is right, replies begin with a part of a known right one.

python -m jaxrl_llm.main --config=prefix_rl
Numbers: from the abstract, which has none; the paper draws its prefixes from right replies of the first model, here
they are the run's own, or the data's answer. The staircase that sets their length, and that a quarter of the visits
goes without, are ours. All else is dapo.py's.
"""


def get_config():
  return dict(
    base='dapo',
    prompt_tokens=80,
    curriculum=dict(hint=dict(fn='prefix', start=0.75, step=0.125, plain=0.25, after=1)),
  )
