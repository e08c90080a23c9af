"""Checks that tests of decode loops share: of rollouts, and of compiled programs."""

from __future__ import annotations

import collections
import functools
import re

import jax
import numpy as np

from jaxrl_llm.models import decoder


def assert_same(got, want, atol=3e-5):
  """Equal tokens, lengths and reasons; log-probabilities equal up to rounding, 1.1e-5 on an Intel CPU with AVX-512."""
  np.testing.assert_array_equal(got.tokens_BxT, want.tokens_BxT)
  np.testing.assert_array_equal(got.length_B, want.length_B)
  np.testing.assert_array_equal(got.reason_B, want.reason_B)
  np.testing.assert_allclose(got.logp_BxT, want.logp_BxT, atol=atol)


def rescored(model, params, prompts, rollout):
  """Log-probs [B, T] by a plain forward pass over whole rows, right-padded."""
  (P, L), (B, T) = prompts.tokens_PxL.shape, rollout.tokens_BxT.shape
  G, n_B = B // P, rollout.length_B
  start_B = np.repeat(prompts.length_P, G)
  row_BxS, mask_BxS = np.zeros((B, L + T), int), np.arange(L + T)[None] < (start_B + n_B)[:, None]
  for b, (start, n) in enumerate(zip(start_B, n_B, strict=True)):
    row_BxS[b, :start] = prompts.tokens_PxL[b // G, :start]
    row_BxS[b, start : start + n] = rollout.tokens_BxT[b, :n]
  logp = np.asarray(jax.nn.log_softmax(_forward(model)(params, row_BxS, mask_BxS)))
  at_BxT = np.minimum(start_B[:, None] + np.arange(T)[None] - 1, L + T - 1)
  return logp[np.arange(B)[:, None], at_BxT, rollout.tokens_BxT]


@functools.cache
def _forward(model):
  return jax.jit(functools.partial(decoder.forward, model))


def assert_written_in_place(text: str, shape: str, arrays: int) -> None:
  """Only updates of one column create arrays of a cache's shape in the compiled program, `arrays` of them."""
  counts = collections.Counter(re.findall(rf'= {re.escape(shape)}\S* ([a-z-]+)\(', text))
  assert counts.pop('dynamic-update-slice') == arrays
  # Before the loop zeros are one broadcast, copied for each further cache. A fusion wraps either of them.
  assert counts.pop('fusion') <= arrays + 1
  assert counts.pop('broadcast') + counts.pop('copy') == arrays
  assert set(counts) <= {'parameter', 'get-tuple-element'}, counts
