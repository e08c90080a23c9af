"""REINFORCE++ without groups, arXiv:2501.03262: returns of a reward with a KL penalty at each token, whitened.

python -m jaxrl_llm.main --config=reinforce_pp_kl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: no discount and the k1 estimator are the paper's (read in verl's code); the coefficient 0.001 is verl's
default. configs/methods/reinforce_pp.py is the variant with a group's mean as its baseline. Learning rate and batch are
ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='raw'),
      reward_kl=dict(fn='k1', coef=0.001),
      credit_assignment=dict(fn='return_whitened', discount=1.0),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
