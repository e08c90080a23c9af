"""Guide, arXiv:2506.13923: unsolved prompts are sampled with the answer as a hint, and learned without it.

python -m jaxrl_llm.main --config=guide
Numbers: the ratio π(y | plain) / π_old(y | hinted) is from memory, and clipped as in DAPO. The paper samples again in
the same step with hints written by a model; here it is the prompt's next visit, and the hint is the answer. All other
settings are those of dapo.py.
"""


def get_config():
  return dict(base='dapo', prompt_tokens=96, curriculum=dict(hint=dict(fn='guide', after=1)))
