"""Learn Your Reference Model, arXiv:2404.09656: the reference model of the KL term follows the policy.

python -m jaxrl_llm.main --config=reference_refresh
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: a share of 0.6 is TRL's default (read in code). TRL refreshes every 512 steps; the default job has 60, and 20
is ours, as is the KL coefficient 0.001. The paper is about preference pairs; the loss is GRPO's. Learning rate and
batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      kl=dict(fn='k3', coef=0.001),
      reference=dict(fn='refreshed', every=20, mixup=0.6),
    ),
  )
