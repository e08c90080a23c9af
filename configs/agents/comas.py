"""CoMAS, arXiv:2510.08529: one policy solves, evaluates and scores; the score pays the solution against the evaluation.

python -m jaxrl_llm.main --config=comas
No verifier takes part in the update: accuracy is logged alone. Rewards, whitening over all turns of a batch, clip 0.2,
gamma 1 and no KL penalty are those of the official script, and so is a uniform choice of prompts. Its four agents with
weights of their own, second round and references are left out. Task, character model, its supervised start on
discussions (half of the solutions wrong, all scores true), batch and learning rate are ours; results are in
tests/bench/results/discussion.md.
"""


def get_config():
  return dict(
    base='tiny',
    scratch=dict(width=64, layers=3, heads=4, kv_heads=4, mlp=256),
    mode='split',
    steps=60,
    prompts=32,
    rollouts=8,
    prompt_tokens=12,
    completion_tokens=40,
    environment=dict(fn='discussion', evaluate='?', score='!', turns=3, weight=0.0),
    objective=dict(
      advantage=dict(fn='raw'),
      credit_assignment=dict(fn='turn_reward_whitened'),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      zero_variance=dict(fn='keep'),
    ),
    optimizer=dict(learning_rate=3e-4, decay='linear'),
    curriculum=dict(
      candidates=dict(fn='stream', multiple=1),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      utility=dict(fn='uniform'),
      eligibility=dict(fn='none'),
    ),
    rewards=dict(fn='exact'),
    sft=dict(steps=300, learning_rate=2e-3, prompts=64),
    data=dict(source='puzzles', tasks=(dict(name='discussed'),)),
    evaluation=dict(every=20, prompts=64, samples=4),
  )
