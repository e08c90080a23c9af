"""MIS (no paper: documentation of TRL and verl): masked importance sampling of whole answers.

python -m jaxrl_llm.main --config=mis
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: the bound of 3 is TRL's default (read in code); `geometric_mask` with 0.99 and 1.01 is what SkyRL
recommends. Sampler and trainer are one program here and agree to about 1e-5, so this acts on rollouts continued
from earlier steps and on drafts. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      importance_correction=dict(fn='sequence_mask', low=0.0, high=3.0),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
    ),
  )
