"""Shuffle-R1, arXiv:2508.05612: pairs of a group's best and worst rollouts, resampled by their difference.

python -m jaxrl_llm.main --config=shuffle_r1
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: half of the pairs, 8 sub-batches of an eighth of them each, clip 0.2/0.28 and no KL penalty are the official
code's, and so is p ∝ |A⁺| + |A⁻|. 16 rollouts of 512 prompts and 32 optimizer steps there; all other settings are
those of dapo.py, with one optimizer step. There a sub-batch is cut into minibatches, here copies of a row are in one.
"""


def get_config():
  return dict(
    base='dapo',
    replay=dict(reuse=dict(fn='contrast_pairs', share=0.5, draws=8)),
    objective=dict(zero_variance=dict(fn='keep'), reward_shaping=dict(fn='none')),
  )
