"""Apriel-Reasoner, arXiv:2604.02007: a penalty near the cap, softer for right answers to hard prompts.

python -m jaxrl_llm.main --config=apriel
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the form of the penalty, and 1 for wrong and truncated completions, are the official code's (actor.py). Its
released configs do not contain the power of the success rate; 1 is ours, as is the buffer of 4 of our 16 tokens. The
official estimator leaves one out and has no std. Its sampling of domains is curriculum.domain_mix.fn=mix, for data of
several sources; the default job has one. Learning rate and batch are ours.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      reward_shaping=dict(fn='overlong_where_solved', buffer_tokens=4, power=1.0, failure=1.0)
    ),
  )
