"""Score centering, arXiv:2609.20807: REINFORCE less the mean score of the sampler, which cancels drift.

python -m jaxrl_llm.main --config=score_centering
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: K = 128 recorded tokens, centered rewards and a mean over tokens are those of the implementation in vime.
Four minibatches per batch are ours: from the second on the sampler is not the policy. Truncated importance weights are
--config.objective.ratio.fn=direct --config.objective.trust_region.fn=cap. Learning rate and batch are ours, for a 135M
model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=4),
    objective=dict(
      advantage=dict(fn='group_centered'),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      score_centering=dict(fn='top_k', tokens=128),
      aggregation=dict(fn='token_mean'),
    ),
  )
