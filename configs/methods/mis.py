"""MIS (no paper: documentation of TRL and verl): masked importance sampling of whole completions.

python -m jaxrl_llm.main --config=mis
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the bound of 3 is TRL's default (read in code); SkyRL recommends `geometric_mask` with 0.99 and 1.01. Sampler
and trainer share one program and agree to about 1e-5 here, so the correction matters only for drafts and for rollouts
continued from earlier steps. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      importance_correction=dict(fn='sequence_mask', low=0.0, high=3.0),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
    ),
  )
