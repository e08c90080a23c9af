"""The table of tiers names files and tests that exist: an entry that names nothing would move nothing."""

from __future__ import annotations

import pathlib

import pytest
import tiers

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize('entry', tiers.PATHS)
def test_an_entry_names_a_tier_and_what_exists(entry):
  file, _, test = entry.partition('[')[0].partition('::')
  assert (HERE / file).exists() and tiers.PATHS[entry] in tiers.TIERS
  assert not test or f'\ndef {test}(' in (HERE / file).read_text()


def test_a_test_is_found_before_its_file_and_a_file_before_its_folder():
  for entry in (entry for entry in tiers.PATHS if '::' in entry):
    file, _, test = entry.partition('::')
    own = tiers.PATHS[entry]
    assert tiers.tier(file, test) == own != tiers.tier(file)
    name, case, _ = test.partition('[')
    assert (tiers.tier(file, f'{name}[another]') == own) == (not case)
  assert tiers.tier('learner/test_lora.py') == 'slow' != tiers.tier('learner/test_new.py')
