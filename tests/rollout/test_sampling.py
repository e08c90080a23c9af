"""The sampler draws from the distribution whose log-probability it reports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout import sampling
from jaxrl_llm.types import Prompts


def slots_of(index, part=None):
  index_P, zeros = jnp.asarray(index), jnp.zeros(len(index), int)
  part_P = None if part is None else jnp.asarray(part)
  return Prompts(zeros[:, None], zeros, index_P, zeros, zeros, part_P)


@pytest.mark.parametrize('vocab', [7, 256, 700])
@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_frequencies_match_the_softmax(vocab, temperature):
  """Chi-square over bins of about equal mass; 5 sigma of its normal approximation."""
  logits_V = jax.random.normal(jax.random.key(0), (vocab,)) * 2
  n = 40_000
  uniform_B = jax.random.uniform(jax.random.key(1), (n,))
  logits_BxV = jnp.broadcast_to(logits_V, (n, vocab))
  token_B, _ = jax.jit(sampling.sample, static_argnums=2)(logits_BxV, uniform_B, temperature)
  want = np.asarray(jax.nn.softmax(logits_V / temperature), np.float64)
  observed = np.bincount(np.asarray(token_B), minlength=vocab)
  big = want * n >= 10
  observed = np.append(observed[big], observed[~big].sum())
  want = np.append(want[big], want[~big].sum()) * n
  observed, want = observed[want > 0], want[want > 0]
  statistic, freedom = ((observed - want) ** 2 / want).sum(), len(want) - 1
  assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_inverse_cdf_finds_the_exact_token():
  """Against numpy's float64 search, for uniforms in the middle of each token's interval."""
  logits_V = np.random.default_rng(0).normal(size=600).astype(np.float32)
  cdf = np.cumsum(np.exp(logits_V.astype(np.float64)))
  cdf /= cdf[-1]
  middle = (np.concatenate([[0], cdf[:-1]]) + cdf) / 2
  logits_BxV = jnp.broadcast_to(jnp.asarray(logits_V), (600, 600))
  token_B, _ = sampling.sample(logits_BxV, jnp.asarray(middle, jnp.float32), 1.0)
  np.testing.assert_array_equal(token_B, np.arange(600))


def test_a_token_without_mass_is_never_drawn():
  logits_V = jnp.where(jnp.arange(600) % 3 == 1, 0.0, -jnp.inf)
  uniform_B = jnp.concatenate([jnp.linspace(0, 1, 2000)[:-1], jnp.asarray([1 - 2**-24])])
  token_B, logp_B = sampling.sample(jnp.broadcast_to(logits_V, (2000, 600)), uniform_B, 1.0)
  assert (np.asarray(token_B) % 3 == 1).all()
  np.testing.assert_allclose(logp_B, -np.log(200), rtol=1e-5)


def test_recorded_log_prob_includes_the_temperature_and_greedy_takes_the_largest():
  logits = jax.random.normal(jax.random.key(2), (5, 300)) * 3
  uniform_B = jnp.linspace(0.1, 0.9, 5)
  token_B, logp_B = sampling.sample(logits, uniform_B, 0.7)
  want = jax.nn.log_softmax(logits / 0.7)[jnp.arange(5), token_B]
  np.testing.assert_allclose(logp_B, want, atol=1e-5)
  token_B, logp_B = sampling.sample(logits, uniform_B, 0.0)
  np.testing.assert_array_equal(token_B, logits.argmax(-1))
  np.testing.assert_allclose(logp_B, jax.nn.log_softmax(logits).max(-1), atol=1e-5)


def test_noise_is_keyed_by_prompt_rollout_and_position():
  key = jax.random.key(3)
  draw = lambda index, t: np.asarray(  # noqa: E731
    sampling.uniforms(sampling.row_keys(key, slots_of(index), 3), t)
  ).reshape(-1, 3)
  a, b = draw([5, 9], 0), draw([9, 7, 5], 0)
  np.testing.assert_array_equal(a[0], b[2])
  np.testing.assert_array_equal(a[1], b[0])
  # A prompt's first slot draws the same as without other slots; its other slots draw other numbers.
  again = np.asarray(
    sampling.uniforms(sampling.row_keys(key, slots_of([5, 5, 5], [1, 0, 2]), 3), 0)
  ).reshape(-1, 3)
  np.testing.assert_array_equal(again[1], a[0])
  assert len(np.unique(again)) == 9
  everything = np.stack([draw([5, 9], t) for t in range(20)]).ravel()
  assert len(np.unique(everything)) == everything.size
  np.testing.assert_array_less(np.abs(everything.mean() - 0.5), 0.12)


@pytest.mark.parametrize(
  'filters',
  [
    dict(top_k=1),
    dict(top_k=7),
    dict(top_p=0.6),
    dict(top_p=1e-6),
    dict(min_p=0.2),
    dict(top_k=20, top_p=0.8, min_p=0.1),
  ],
  ids=str,
)
def test_filters_equal_those_of_transformers(filters):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  logits = np.random.default_rng(0).normal(size=(5, 60)).astype(np.float32) * 2
  want = torch.from_numpy(logits.copy())
  for name, value in filters.items():
    kind = {'top_k': 'TopK', 'top_p': 'TopP', 'min_p': 'MinP'}[name]
    want = getattr(transformers, f'{kind}LogitsWarper')(value)(None, want)
  got = sampling.filter_logits(jnp.asarray(logits), sampling.TokenFilter(**filters))
  np.testing.assert_array_equal(got, want.numpy())
  assert np.isinf(want.numpy()).any() and np.isfinite(want.numpy()).any(1).all()


def test_filtered_tokens_are_never_drawn_and_log_probs_are_renormalized():
  logits = jnp.broadcast_to(jnp.log(jnp.array([0.1, 0.4, 0.3, 0.2])), (3000, 4))
  uniform_B = (jnp.arange(3000) + 0.5) / 3000
  token_B, logp_B = sampling.sample(logits, uniform_B, 1.0, sampling.TokenFilter(top_k=2))
  np.testing.assert_allclose(
    np.bincount(token_B, minlength=4) / 3000, [0, 4 / 7, 3 / 7, 0], atol=1e-3
  )
  np.testing.assert_allclose(jnp.exp(logp_B), np.array([0, 4, 3, 0])[token_B] / 7, atol=1e-6)
