"""GKD, arXiv:2306.13649: the generalized Jensen-Shannon divergence from a teacher on the policy's own completions.

python -m jaxrl_llm.main --config=gkd
It downloads the teacher from the hub; a model folder on disk works as well: --config.objective.teacher=FOLDER.
Numbers: beta 0.5 is TRL's; all completions are the policy's own, lambda 1 in the paper, and TRL mixes them with the
data's. One rollout a prompt and the batch are ours, as in distill.py, which has the gradient for sampled tokens. The
whole vocabulary is compared. --config.objective.divergence.fn=forward_kl (or reverse_kl) has the limits of beta. With
reward_weight rewards join the loss; at 0 they affect only the choice of prompts and the evaluation.
"""


def get_config():
  return dict(
    base='sums',
    prompts=32,
    rollouts=1,
    objective=dict(
      advantage=dict(fn='raw', baseline=0.0),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      aggregation=dict(fn='token_mean'),
      divergence=dict(fn='jensen_shannon', beta=0.5),
      teacher='HuggingFaceTB/SmolLM2-360M-Instruct',
    ),
  )
