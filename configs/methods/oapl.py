"""OAPL, arXiv:2602.19362, in KARL, arXiv:2603.05218: large batches; squares of β₂·log(π/π_sampler) − (R − V*) of rows.

python -m jaxrl_llm.main --config=oapl
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the formula is from third-party notes; β₁ = 0.5 and β₂ = 1e-3 are those of A*-PO (a_star_po.py), which has the
first weights in the place of the sampler's. V* = β₁·log mean e^{R/β₁} is of the prompt's group. The papers learn up to
hundreds of updates from one policy's rollouts, without importance weights; here a batch has 16 prompts in 4
minibatches, for a 135M model on a laptop, as are learning rate and group size.
"""


def get_config():
  return dict(
    base='sums',
    prompts=16,
    learner=dict(minibatches=4),
    objective=dict(
      advantage=dict(fn='log_mean_exp', temperature=0.5),
      ratio=dict(fn='one'),
      trust_region=dict(fn='none'),
      kl=dict(fn='sequence_quadratic_old', coef=1e-3 / 1.5),
      aggregation=dict(fn='sequence_sum'),
    ),
  )
