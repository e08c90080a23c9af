"""Drafts from the group's text: the same tokens in fewer rounds."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm import config as configs
from jaxrl_llm import shard
from jaxrl_llm import step as steps
from jaxrl_llm.generate import engine, ngram, order, stopping
from jaxrl_llm.models import decoder
from jaxrl_llm.program import make_program
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, ModelConfig, Prompts, UserError

MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
P, G, L, T = 6, 4, 7, 17
B = P * G


@pytest.fixture(scope='module')
def params():
  """Sharp enough for siblings to repeat each other, and not always."""
  return jax.tree.map(lambda x: x * 1.9, decoder.init(MODEL, 0))


def make_prompts():
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  expected_P = np.array([3, 0, 9, 5, 1, 12], np.float32)
  return Prompts(tokens_PxL, length_P, np.arange(P, dtype=np.int32) * 7, np.full(P, 2), expected_P)


def run(params, draft=0, begun=None, cap=None, version=4, match=3, **changes):
  """The plain engine without a draft, else the loop with drafts: rollout, rounds, counts."""
  spec = engine.Spec(G, T, 1.0, (3, 11), 'float32')._replace(**changes)

  @jax.jit
  def fn(params, prompts, begun, cap):
    given = MODEL, params, prompts, jax.random.key(1), version, spec
    if not draft:
      return *engine.generate(*given, begun=begun, cap=cap), None
    return ngram.generate(*given, ngram.Settings(match, draft), begun=begun, cap=cap)

  return jax.tree.map(np.asarray, fn(params, make_prompts(), begun, cap))


def assert_same(got, want):
  np.testing.assert_array_equal(got.tokens_BxT, want.tokens_BxT)
  np.testing.assert_array_equal(got.length_B, want.length_B)
  np.testing.assert_array_equal(got.reason_B, want.reason_B)
  np.testing.assert_allclose(got.logp_BxT, want.logp_BxT, atol=2e-5)
  np.testing.assert_array_equal(got.version_BxT, want.version_BxT)


@pytest.mark.parametrize('temperature', [1.0, 0.0])
@pytest.mark.parametrize('draft', [1, 2, 4, 8])
def test_drafts_change_no_token(params, draft, temperature):
  want, rounds, _ = run(params, temperature=temperature)
  got, fewer, counts = run(params, draft, temperature=temperature)
  assert_same(got, want)
  print(draft, temperature, rounds, fewer, counts)
