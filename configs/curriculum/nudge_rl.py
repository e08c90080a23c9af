"""NudgeRL, arXiv:2605.15726: two strategies per prompt, and advantages that separate strategy and rollout.

python -m jaxrl_llm.main --config=nudge_rl
Numbers: two strategies × 4 rollouts and 1.1 between strategies are the official code's. It drops the strategy of
every second rollout, here of every second slot; its std is over n, ours over n − 1; its mean is over rollouts, ours
over tokens. Its term on the plain prompt is left out. The strategies, learning rate and batch are ours, for a 135M
model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    prompts=8,
    rollouts=4,
    prompt_tokens=96,
    curriculum=dict(
      hint=dict(
        fn='contexts',
        texts=('Add the numbers from left to right.', 'Add the tens first, then the ones.'),
        drop=0.5,
      ),
      slots_per_prompt=2,
    ),
    objective=dict(
      advantage=dict(fn='nudged', between=1.1),
      aggregation=dict(fn='token_mean'),
    ),
  )
