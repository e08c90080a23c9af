"""PPO, arXiv:1707.06347: a critic estimates the value of each prefix; generalized advantage estimation (GAE).

python -m jaxrl_llm.main --config=ppo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: clip 0.2 is the paper's. Discount and trace 1 (GAE, arXiv:1506.02438), whitened advantages, values clipped at
0.5, the token mean and the critic's learning rate 1e-5 are verl's defaults; its KL penalty on rewards is left out.
The policy's learning rate and the batch are ours, for a 135M model on a laptop. The critic is a second model of the
policy's size with its own optimizer: about twice the memory and time of an update.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='raw'),
      credit_assignment=dict(fn='gae', discount=1.0, trace=1.0),
      auxiliary_model=dict(fn='critic', learning_rate=1e-5, clip=0.5),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
  )
