"""The tables of launch/: as notebook_estimates.py writes them, and of the notebooks' present settings."""

from __future__ import annotations

import json

import notebook_estimates
import pytest

RECORDS = json.loads(notebook_estimates.RECORDS.read_text())
COMMAND = 'python tests/notebook_estimates.py'


@pytest.mark.parametrize('row', notebook_estimates.rows(), ids=lambda row: row.name)
def test_a_row_was_compiled_with_the_notebooks_settings(row):
  """`data`, rewards and numbers inside the program are no part of it."""
  remedy = f"run {COMMAND} '{row.name}'"
  assert row.name in RECORDS, remedy
  assert RECORDS[row.name]['settings'] == json.loads(json.dumps(row._asdict())), remedy


def test_there_is_no_row_of_another_notebook():
  assert list(RECORDS) == [row.name for row in notebook_estimates.rows()]


def test_the_tables_are_those_of_the_records():
  for path, text in notebook_estimates.texts(RECORDS).items():
    assert path.read_text() == text, f'run {COMMAND} --write'


def test_what_is_expected_of_a_chip_fits():
  for name, record in RECORDS.items():
    assert 0 < record['memory_gib'] < record['hbm_gib'], name
    parts_s = record['decode_s'] + record['update_s']
    assert record['step_s'] == pytest.approx(parts_s) and record['update_s'] > 0, name
