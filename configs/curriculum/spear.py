"""SPEAR, arXiv:2509.22601: good rollouts of recent steps are imitated, over the median of recent baselines.

python -m jaxrl_llm.main --config=spear
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: age 10, 10,240 baselines, a replay at 1.5 times its size, a warm-up of 200 steps, clip 0.2/0.28, advantages
without a standard deviation, Dr.GRPO's denominator, and Clip-Cov with 0.02 and the band 1 to 40 for replayed rows are
the official code's; the last two are those of its verl-agent. It replays up to 2,048 rollouts, as many as a batch;
here as many groups as a batch, in one optimizer step with it instead of steps after it, and 20 steps of warm-up for
the 60 of the job. A prompt keeps its newest rollouts. Reward for tool calls, which fades, is left out: rollouts have
one turn. Zero-variance groups leave the loss, instead of the quarter with the least spread.
"""


def get_config():
  return dict(
    base='dapo',
    replay=dict(reuse=dict(fn='self_imitation', share=0.5, max_age=10, warm_up_steps=20)),
    objective=dict(
      advantage=dict(fn='group_centered'),
      token_weighting=dict(
        fn='covariance_clip_by_term',
        share=0.0002,
        low=1.0,
        high=5.0,
        replayed_share=0.02,
        replayed_low=1.0,
        replayed_high=40.0,
      ),
      aggregation=dict(fn='fixed'),
      reward_shaping=dict(fn='none'),
    ),
  )
