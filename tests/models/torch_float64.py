"""torch and jax in float64 where models ask for float32, and rotary frequencies that do not depend on the CPU."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip('torch')


@contextlib.contextmanager
def float64_for_float32():
  """Within, float32 is float64: models convert norms, softmaxes, decays and frequencies to it by name."""
  usual = torch.get_default_dtype()
  with pytest.MonkeyPatch.context() as patch:
    for name in ('float32', 'float'):
      patch.setattr(torch, name, torch.float64)
    patch.setattr(torch.Tensor, 'float', torch.Tensor.double)
    patch.setattr(jnp, 'float32', jnp.float64)
    torch.set_default_dtype(torch.float64)
    try:
      with jax.enable_x64(True):
        yield
    finally:
      torch.set_default_dtype(usual)


def rounded_once(model):
  """The model with rotary frequencies computed in float64, in the dtype of its weights.

  The powers of torch in float32 depend on the kind of CPU; at position 300 an ulp of them moves logits by 1e-5.
  """
  dtype = next(model.parameters()).dtype
  for name, module in list(model.named_modules()):
    if any(key.endswith('inv_freq') for key, _ in module.named_buffers(recurse=False)):
      parent, _, last = name.rpartition('.')
      with float64_for_float32():
        exact = type(module)(module.config)
      setattr(model.get_submodule(parent), last, exact.to(dtype))
  return model
