"""Small curricula for tests, with plain stages except for those that are named."""

from __future__ import annotations

import pathlib

import numpy as np

from jaxrl_llm.config import loading
from jaxrl_llm.curriculum import Curriculum

G = 8
CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'
# No pooled priors, decay or audits.
PLAIN = dict(
  prior_pooling=dict(fn='none'),
  evidence_decay=dict(fn='none'),
  eligibility=dict(fn='none'),
  selection=dict(fn='top'),
)
# One entry of settings per paper, and combinations without a config.
RULES = {
  **{
    name: loading.load(name).curriculum.to_dict()
    for name in (
      'sums',
      'mopps',
      'bots',
      'vade',
      'greso',
      'scale_rl',
      'dots',
      'hidden_state',
      'answer_odds',
      'clpo',
      'r3l',
      'hill',
    )
  },
  'anchored': dict(
    prior_pooling=dict(fn='anchors', rho=0.3, adaptive=True), evidence_decay=dict(fn='visit')
  ),
  'fitted': dict(prior_pooling=dict(fn='fitted_kind', visits=2.0)),
  'regressed': dict(prior_pooling=dict(fn='regression', visits=2.0)),
  'mixed': dict(domain_mix=dict(fn='mix', targets=dict(a=3.0, b=1.0), measure='tokens')),
  'short': dict(utility=dict(fn='per_token'), truncated='ignore'),
}


def columns(size: int) -> dict:
  """Fields of the rows, equal for every call."""
  random = np.random.default_rng(7)
  weak_N = 0.5 * random.random(size)
  return dict(
    pass_rate_weak=weak_N,
    pass_rate_strong=weak_N + 0.5 * random.random(size),
    traits=random.normal(size=(size, 3)),
    source=['ab'[i % 2] for i in range(size)],
  )


def make(size: int = 40, *, seed: int = 0, kind=None, fields: dict | None = None, **parts):
  """A curriculum of the defaults with `parts` changed; `fields`: columns of the rows."""
  settings = loading.default().curriculum.to_dict() | parts
  fields = columns(size) if fields is None else fields
  return Curriculum(settings, size, group=G, seed=seed, kind=kind, columns=fields)


def observe(curriculum, index, k, **kwargs) -> None:
  curriculum.observe(np.asarray(index), np.asarray(k), np.full(len(index), G), **kwargs)


def posterior(curriculum) -> np.ndarray:
  """[2, N], α and β, from what it predicts."""
  mean, variance, _ = curriculum.predict(np.arange(curriculum.size))
  total = mean * (1 - mean) / variance - 1
  return np.stack([mean * total, (1 - mean) * total])


def same(a: dict, b: dict) -> bool:
  return a.keys() == b.keys() and all(
    a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k], equal_nan=True) for k in a
  )
