"""CoMAS, arXiv:2510.08529: one policy solves, evaluates and scores; the score pays the solution against the evaluation.

python -m jaxrl_llm.main --config=comas
No verifier takes part in the update: accuracy is logged alone. Rewards, whitening over all turns of a batch, clip 0.2,
gamma 1 and no KL penalty are those of the official script, and so is a uniform choice of prompts. Its four agents with
weights of their own, second round and references are left out. Task, character model, its supervised start on
discussions (half of the solutions wrong, all scores true), batch and learning rate are ours. The policy learns what its
scorer knows from that start, and with a scorer at chance unlearns the task: tests/bench/results/discussion.md.
"""


def get_config():
  return dict(
    base='guess',
    steps=40,
    prompt_tokens=12,
    completion_tokens=32,
    environment=dict(
      fn='discussion', evaluate='?', score='!', turns=3, judge='rewards', weight=0.0
    ),
    objective=dict(
      advantage=dict(fn='raw'),
      credit_assignment=dict(fn='turn_reward_whitened'),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      zero_variance=dict(fn='keep'),
    ),
    curriculum=dict(  # none: a posterior over success rates would read the verifier
      candidates=dict(fn='stream', multiple=1),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      utility=dict(fn='uniform'),
      eligibility=dict(fn='none'),
    ),
    # With 1e-3 the scorer soon approves of every solution.
    optimizer=dict(learning_rate=1e-4),
    sft=dict(steps=900),
    data=dict(
      source='puzzles', size=20000, tasks=(dict(name='discussed', min_length=5, max_length=5),)
    ),
  )
