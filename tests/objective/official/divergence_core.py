"""What goldens of divergences share: a teacher's logits, and the project's gradient with respect to the policy's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import divergence
from tests.objective.official import entropy_core, lib

# Output → function and settings; the limits of β have functions of their own.
BETAS = {
  'forward': (0.0, dict(fn='forward_kl')),
  'reverse': (1.0, dict(fn='reverse_kl')),
  'middle': (0.5, dict(fn='jensen_shannon', beta=0.5)),
  'low': (0.2, dict(fn='jensen_shannon', beta=0.2)),
}
SETTINGS = dict(
  advantage=dict(fn='raw', baseline=0.0),
  ratio='one',
  trust_region='none',
  aggregation='token_mean',
)


def draw(seed: int) -> dict[str, np.ndarray]:
  """`entropy_core.draw` with a teacher's logits, of which one token of each row has nearly all of the probability."""
  data, r = entropy_core.draw(seed), np.random.default_rng((seed, 4))
  teacher = np.round(2 * r.normal(size=data['logits'].shape), 4)
  teacher[:, 0, 1] += 12.0
  return data | dict(teacher=teacher)


def gradients(data: dict[str, np.ndarray], top_k: int = 0) -> dict[str, np.ndarray]:
  """Gradient [B, T, V] of the project's term, by output; rewards leave the loss."""
  method = objective.method(lib.settings(SETTINGS))
  target = objective.targets(method, lib.batch(data, needs_old=False), lib.G)

  def gradient(settings: dict[str, Any]) -> np.ndarray:
    keywords = {name: x for name, x in settings.items() if name != 'fn'}
    term = getattr(divergence, settings['fn'])(top_k=top_k, **keywords)
    assert term.reward_weight == 0

    def loss(logits_BxTxV):
      pair = jax.nn.log_softmax(logits_BxTxV), jax.nn.log_softmax(jnp.asarray(data['teacher']))
      return (target.weight_BxT * term.between(*pair)).sum()

    return np.asarray(jax.grad(loss)(jnp.asarray(data['logits'])))

  return {name: gradient(settings) for name, (_, settings) in BETAS.items()}
