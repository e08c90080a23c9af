"""RoRecomp, arXiv:2509.25958: short right and long wrong rollouts are learned first, the others later and more seldom.

python -m jaxrl_llm.main --config=rorecomp
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: reconstructed from the abstract, which names priority batches of short right and long wrong rollouts, and
compensation batches of the others from a buffer. Half of a group's right and half of its wrong rollouts have priority;
a step learns others with a probability that falls from 1 to 0.2, in 40 of the 60 steps of the job; all of that is
ours, and so is one optimizer step for both. Advantages are those of whole groups. Length has no part in the reward.
"""


def get_config():
  return dict(
    base='dapo',
    replay=dict(
      reuse=dict(fn='recomposed', kept=0.5, share=0.5, least=0.2, fall_steps=40, max_age=8)
    ),
    objective=dict(zero_variance=dict(fn='keep'), reward_shaping=dict(fn='none')),
  )
