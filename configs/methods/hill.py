"""HiLL, arXiv:2604.00698: the policy writes hints for the questions it never solves, and learns to write them.

python -m jaxrl_llm.main --config=hill
Numbers: 8 rollouts, 4 hints, T = 0.3, penalty −0.2, clip 0.2/0.28 with dual clip 3, GRPO's advantages, the token mean
and two minibatches are those of the official script. There a second model writes the hints (Qwen3-4B for a reasoner of
7B), and a step samples prompts, hints and hinted groups. Here the writer is the policy with another prompt, learned in
the same batches, and a step's slots are shared: the step after a group of wrong rows alone asks for hints, the next
ones sample a group with each, and then the hints and the group of the best one are learned, with the ratio to the
weights that sampled them. The failed attempt is cut in the middle to make a request fit; there the whole request is.
The instruction, the batch (128 prompts there) and the learning rate (1e-6 there) are ours, for a 135M model on a
laptop. That model writes no hints: of the replies to 8 requests in 4 steps none had the tags, so that only plain groups
taught it. Name a larger one.
"""


def get_config():
  return dict(
    base='sums',
    prompts=8,
    rollouts=8,
    prompt_tokens=288,
    completion_tokens=96,
    curriculum=dict(
      hint=dict(fn='written', hints=4, tag='hint', temperature=0.3, penalty=-0.2),
      candidates=dict(fn='stream', multiple=1),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      utility=dict(fn='uniform'),
      eligibility=dict(fn='none'),
    ),
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      trust_region=dict(fn='dual_clip', low=0.2, high=0.28, most=3.0),
      aggregation=dict(fn='token_mean'),
      zero_variance=dict(fn='keep'),
    ),
  )
