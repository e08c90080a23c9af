"""What goldens of entropy bonuses share: draws with logits, and the project's gradient with respect to them."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.models import logprob
from tests.objective.official import lib

V = 5


def draw(seed: int) -> dict[str, np.ndarray]:
  """`lib.draw` with log-probs of a softmax over V tokens, of which `token` was sampled."""
  data, r = lib.draw(seed), np.random.default_rng((seed, 2))
  shape = data['logp'].shape
  logits = np.round(2 * r.normal(size=(*shape, V)), 4)
  token = r.integers(0, V, shape)
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  logp = np.take_along_axis(logp, token[..., None], -1)[..., 0]
  drift = data['logp'] - data['old']
  return data | dict(logits=logits, token=token, logp=logp, old=logp - drift)


def tensors(torch: Any, data: dict) -> types.SimpleNamespace:
  """`lib.tensors`, where `logp` is that of `logits`, which collect the gradient."""
  x = lib.tensors(torch, data)
  x.logits.requires_grad_()
  logp = torch.log_softmax(x.logits, -1)
  x.logp = torch.gather(logp, -1, x.token.long()[..., None])[..., 0]
  return x


def outputs(x: types.SimpleNamespace, loss: Any) -> dict[str, Any]:
  """The gradient [B, T, V], 0 for empty rows."""
  loss.backward()
  gradient_BxTxV = np.zeros(x.exists.shape + x.logits.shape[1:])
  gradient_BxTxV[x.exists] = x.logits.grad.numpy()
  return dict(gradient=gradient_BxTxV)


def gradient(settings: dict, data: dict, coef: float) -> dict[str, np.ndarray]:
  """Gradient of the project's loss with an entropy bonus of this coefficient."""
  method = objective.method(lib.settings(settings))
  target = objective.targets(method, lib.batch(data, needs_old=False), lib.G)
  c_BxT, _ = objective.coefficients(method, target, data['logp'], data['entropy'])

  def loss(logits_BxTxV):
    total_BxT, entropy_BxT = logprob.partition_and_entropy(logits_BxTxV)
    picked_BxTx1 = jnp.take_along_axis(logits_BxTxV, data['token'][..., None], -1)
    logp_BxT = picked_BxTx1[..., 0] - total_BxT
    return -(c_BxT * logp_BxT + coef * target.weight_BxT * entropy_BxT).sum()

  return dict(gradient=np.asarray(jax.grad(loss)(jnp.asarray(data['logits']))))
