"""Guide, arXiv:2506.13923: prompts that nobody solved are asked with the answer told, and learned as if it were not.

python -m jaxrl_llm.main --config=guide
Numbers: the ratio π(y | plain) / π_old(y | told) is from memory and clipped as DAPO clips. The paper asks again in
the same step and with hints written by a model; here it is the prompt's next visit, and the hint is the answer. All
else is dapo.py's.
"""


def get_config():
  return dict(base='dapo', prompt_tokens=96, curriculum=dict(hint=dict(fn='guide', after=1)))
