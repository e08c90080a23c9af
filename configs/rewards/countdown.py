"""Countdown as TinyZero asks it: make a number of three or four others, reason in <think>, answer in <answer>.

python -m jaxrl_llm.main --config=countdown
  --config.model=Qwen/Qwen2.5-3B                 (TinyZero's; any model of README.md, or a folder)
Rows are made by data/countdown.py and can be solved; those of TinyZero's own files (fields target and numbers in
reward_model.ground_truth) are graded by the same rule with data.source=files. Right is 1; both marks, once and at the
end, are worth 0.1 more, as TinyZero pays 0.1 for the form of a wrong answer (from memory).
Numbers: 256 + 1024 tokens, 256 prompts a step, minibatches of half of them, learning rate 1e-6 and a KL term of 0.001
are TinyZero's script (from memory; it is PPO with a critic). GRPO with 8 rollouts, numbers up to 99 and targets up to
100 are ours. Prompts come in a shuffled stream: no curriculum.
Expected, by others' accounts (our notes): a 3B base model learns it, one of 0.5B does not; Qwen3-1.7B, with other
settings, from 44.6 % to 67 at step 20 and 75 at step 60 (lmpo). Nothing here has run it at that size. For a laptop:
--config.model=smollm2-135m --config.prompts=4 --config.learner.minibatches=1 --config.learner.microbatch_rollouts=0
--config.completion_tokens=96, which shows the loop and hardly learns.
"""


def get_config():
  return dict(
    model='Qwen/Qwen2.5-3B',
    steps=100,
    prompts=256,
    rollouts=8,
    prompt_tokens=256,
    completion_tokens=1024,
    learner=dict(minibatches=2, microbatch_rollouts=64),
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      kl=dict(fn='k3', coef=0.001),
      aggregation=dict(fn='token_mean'),
    ),
    optimizer=dict(learning_rate=1e-6),
    curriculum=dict(
      candidates=dict(fn='stream', multiple=1),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      utility=dict(fn='uniform'),
      eligibility=dict(fn='none'),
    ),
    rewards=dict(
      fn='countdown', tag='answer', parts=(dict(fn='tagged', tag='answer', weight=0.1),)
    ),
    data=dict(
      source='puzzles',
      size=50000,
      template=(
        'With + - * / and brackets, each number once, {question} Think inside <think> </think>, then give the '
        'expression inside <answer> </answer>, such as <answer>(1 + 2) / 3</answer>.'
      ),
      tasks=(dict(name='countdown', min_numbers=3, max_numbers=4, max_number=99, max_target=100),),
    ),
    evaluation=dict(every=20, prompts=512, samples=0),
    checkpoint=dict(every=20, keep=2),
  )
