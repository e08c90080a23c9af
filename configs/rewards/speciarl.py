"""SpeciaRL, arXiv:2603.03197: the best answers of a group are right, whatever their grade; all others are wrong.

python -m jaxrl_llm.main --config=speciarl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the rule is the official code's with REWARD_MODE=all, as in its scripts (read in code). There a judge grades
how specific a class is, from wrong to more specific; grades of 0 and 1 here leave rewards as they are, and another
reward function may return any. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(reward_shaping=dict(fn='best_of_group', wrong=0.0)),
  )
