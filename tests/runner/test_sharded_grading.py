"""Processes that grade one batch, as threads of one: all hear the same, and groups stay whole where it matters."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.runner import sharded_grading
from jaxrl_llm.types import Row

OWN = """
import os
def longest(completions, **kwargs):
  most = max(map(len, completions))
  return [float(len(c) == most) for c in completions]
def many(completions, **kwargs):
  return [float(len(completions)) for _ in completions]
"""
ROWS = [Row(name, 'q', (), '7', 's', {}) for name in 'aabbbcab']
TEXTS = ['7', '77', '7', '777', '7', '7', '7777', '7']


@pytest.fixture
def processes(monkeypatch, tmp_path):
  """f(spec, count) → what each of so many processes hears of ROWS and TEXTS."""
  (tmp_path / 'own_together.py').write_text(OWN)
  monkeypatch.syspath_prepend(str(tmp_path))
  here = threading.local()
  monkeypatch.setattr(sharded_grading.jax, 'process_index', lambda: here.index)

  def run(spec, count, texts):
    barrier, given, heard = threading.Barrier(count), [None] * count, [None] * count

    def gather(arrays):
      given[here.index] = arrays
      barrier.wait(60)
      return tuple(np.stack(parts) for parts in zip(*given, strict=True))

    monkeypatch.setattr(sharded_grading.jax, 'process_count', lambda: count)
    monkeypatch.setattr(sharded_grading.multihost_utils, 'process_allgather', gather)

    def process(index):
      here.index = index
      with rewards.Pool(spec) as pool:
        heard[index] = sharded_grading.Pool(pool).score(ROWS[: len(texts)], texts)

    threads = [threading.Thread(target=process, args=(index,)) for index in range(count)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(120)
    return heard

  return run


@pytest.mark.parametrize(
  'spec',
  [
    dict(fn='number'),
    dict(fn='own_together:longest', batched='group', workers=1),
    dict(fn='number', workers=1, parts=(dict(fn='own_together:many', batched='step'),)),
  ],
)
@pytest.mark.parametrize('texts', [TEXTS, TEXTS[:1]])
def test_every_process_hears_what_one_would(processes, spec, texts):
  with rewards.Pool(spec) as pool:
    alone = pool.score(ROWS[: len(texts)], texts)
  for heard in processes(spec, 2, texts):
    np.testing.assert_array_equal(heard.parts_BxK, alone.parts_BxK)
    np.testing.assert_array_equal(heard.outcome_B, alone.outcome_B)
    assert heard.counts == alone.counts


def test_the_work_is_dealt_out():
  assert sharded_grading._shares(ROWS, 3, ['']) == [[0, 3, 6], [1, 4, 7], [2, 5]]
  assert sharded_grading._shares(ROWS, 2, ['', 'group']) == [[0, 1, 5, 6], [2, 3, 4, 7]]
  assert sharded_grading._shares(ROWS, 2, ['group', 'step']) == [list(range(8)), []]
