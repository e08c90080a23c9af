"""Columns of the data: sources, traits, and the fields of a file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrl_llm import curriculum as curriculum_lib
from jaxrl_llm import data
from jaxrl_llm.config import loading as configs
from jaxrl_llm.data import files
from jaxrl_llm.data.tasks import make_row

ROWS = [
  make_row('sums', '1+1', '2', dict(terms=2, rate=0.5, near=[1.0, 2.0])),
  make_row('sums', '1+2+3', '6', dict(terms=3, rate=0.25, near=[3.0, 4.0])),
  make_row('rev', '12', '21', dict(terms=2, near=[5.0, 6.0])),
]


def test_fields_come_by_name_and_none_where_a_row_lacks_them():
  columns = data.Columns(ROWS)
  assert columns['source'] == ['sums', 'sums', 'rev'] and columns['rate'] == [0.5, 0.25, None]
  assert np.array_equal(columns['near'], [[1, 2], [3, 4], [5, 6]])
  assert list(columns) == ['near', 'rate', 'source', 'terms', 'traits'] and len(columns) == 5
  assert 'rate' in columns and 'pace' not in columns
  with pytest.raises(KeyError):
    columns['pace']


def test_traits_are_one_hot_over_sources_and_small_numbers():
  hot = data.Columns(ROWS)['traits']
  # rev, sums, terms=2, terms=3
  assert hot.tolist() == [[0, 1, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]] and hot.dtype == np.float32
  assert data.kinds(ROWS).tolist() == [1, 2, 0]


def test_pass_rates_of_a_file_reach_the_curriculum(tmp_path):
  """Anchor pass rates of a JSON line enter the estimate p̃ unchanged."""
  records = [dict(question=f'q{i}', answer='1', low=i / 10, high=1 - i / 20) for i in range(4)]
  path = tmp_path / 'rows.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in records))
  settings = configs.default().curriculum.to_dict() | dict(
    prior_pooling=dict(fn='anchors', weak='low', strong='high', rho=1.0),
    evidence_decay=dict(fn='none'),
  )
  columns = data.Columns(files.read(str(path), 'config.data.path'))
  curriculum = curriculum_lib.Curriculum(settings, 4, group=8, columns=columns)
  curriculum.observe(np.array([0]), np.array([4]), np.array([8]))  # halfway from 0 to 1: c = 1/2
  low, high = (np.array([row[name] for row in records]) for name in ('low', 'high'))
  guess = (low + high)[1:] / 2
  mean = curriculum.predict(np.arange(1, 4))[0]
  np.testing.assert_allclose(mean, (1 + 8 * guess) / 10, rtol=1e-5)
