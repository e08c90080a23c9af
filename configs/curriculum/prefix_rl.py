"""PrefixRL, arXiv:2601.18795: where no rollout is right, completions begin with a part of a known right one.

python -m jaxrl_llm.main --config=prefix_rl
Numbers: from the abstract, which has none. The paper takes prefixes from right completions of the first model; here
they are those of the run, or the data's answer. The staircase that sets their length and the quarter of visits
without a hint are ours. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    prompt_tokens=80,
    curriculum=dict(hint=dict(fn='prefix', start=0.75, step=0.125, plain=0.25, after=1)),
  )
