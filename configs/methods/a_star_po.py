"""A*-PO, arXiv:2505.20686: least squares of β₂·log(π/π_ref) of a row against R − V*, V* a soft maximum of rewards.

python -m jaxrl_llm.main --config=a_star_po
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: β₁ = 0.5, β₂ = 1e-3 and two minibatches per batch are the official code's. There V* = β₁·log mean e^{R/β₁} is
of eight rollouts of the reference model, sampled once before training, and one further rollout of a prompt is learned.
Here it is of the prompt's group, which the current policy samples, and the whole group is learned: V* follows the
policy, and includes the row's own reward. `log_mean_exp` divides R − V* by 1 + β₁, and so does `coef`: the loss is the
paper's over 2·β₂·(1 + β₁), a constant. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    learner=dict(minibatches=2),
    objective=dict(
      advantage=dict(fn='log_mean_exp', temperature=0.5),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      kl=dict(fn='sequence_quadratic', coef=1e-3 / 1.5),
      aggregation=dict(fn='sequence_sum'),
    ),
  )
