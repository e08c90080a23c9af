"""R3, arXiv:2510.11370: a mixture of experts is trained with the experts that sampling chose for each token.

python -m jaxrl_llm.main --config=r3
The job of tiny.py with eight experts, two per token. A batch is learned in four optimizer steps, so that the routers
have changed since its tokens were sampled; on an accelerator bfloat16 alone makes sampler and trainer choose
differently at times. --config.learner.replay_experts=False turns it off. Numbers: ours, not tuned.
"""


def get_config():
  return dict(
    base='tiny',
    scratch=dict(mlp=128, experts=8, experts_per_token=2),
    learner=dict(replay_experts=True, minibatches=4),
    optimizer=dict(learning_rate=1e-4),
    data=dict(
      tasks=(
        dict(name='rev', min_length=1, max_length=5),
        dict(name='sort', min_length=1, max_length=5),
      )
    ),
  )
