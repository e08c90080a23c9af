"""The consistency check with simulated processes; test_processes.py has real ones."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm import curriculum as curriculum_lib
from jaxrl_llm.config import loading
from jaxrl_llm.distributed import consistency
from jaxrl_llm.types import UserError


def curriculum(right: int) -> curriculum_lib.Curriculum:
  result = curriculum_lib.Curriculum(
    loading.default().curriculum, 20, group=4, seed=0, kind=np.zeros(20, np.int32)
  )
  result.observe(np.arange(4), np.array([right, 0, 2, 4]), np.full(4, 4))
  return result


def state(right: int = 1) -> dict:
  result = curriculum(right)
  chosen = result.propose(1, 4, lambda index: np.ones(len(index))).index
  return dict(config='{}', curriculum=result.state_dict(), prompts=chosen)


def gather(monkeypatch, *others: dict):
  """Patch the all-gather so that the other processes have these states."""
  codes = [[consistency.digest(part) for part in other.values()] for other in others]
  monkeypatch.setattr(
    consistency.multihost_utils, 'process_allgather', lambda own: np.stack([own, *np.int32(codes)])
  )


def test_equal_processes_pass(monkeypatch):
  gather(monkeypatch, state(), state())
  consistency.check(10, state())


@pytest.mark.parametrize('ours, others, odd', [(1, (1, 2), 2), (2, (1, 1), 0), (1, (2,), 1)])
def test_another_curriculum_is_named_with_its_process(monkeypatch, ours, others, odd):
  gather(monkeypatch, *map(state, others))
  with pytest.raises(UserError, match='^[^\n]*$') as error:
    consistency.check(10, state(ours))
  count = 1 + len(others)
  assert f'at step 10 process {odd} of {count} holds other curriculum' in str(error.value)
  assert 'config' not in str(error.value).split(' than the rest')[0]


def test_every_process_and_part_is_named():
  codes_DxK = np.array([[1, 2, 3], [1, 2, 3], [9, 2, 8], [1, 2, 7]])
  assert consistency.difference(['config', 'data', 'prompts'], codes_DxK) == (
    'process 2 of 4 holds other config, prompts than the rest and process 3 of 4 holds other prompts than the rest'
  )


@pytest.mark.parametrize(
  'one, two',
  [
    (dict(a=1), dict(a=2)),
    (dict(a=1), dict(b=1)),
    (['ab', 'c'], ['a', 'bc']),
    ([[1], 2], [[1, 2]]),
    (1, '1'),
    (None, 0),
    (np.zeros(4, np.float32), np.zeros(4, np.int32)),
    (np.zeros((2, 2)), np.zeros(4)),
    (np.array([0.1]), np.array([np.nextafter(0.1, 1)])),
  ],
)
def test_different_values_have_different_hashes(one, two):
  assert consistency.digest(one) != consistency.digest(two)


def test_the_hash_depends_on_the_value_alone():
  """Not of the order of a dict's keys, the layout of an array, or Python's own hash, which each process salts."""
  one, two = dict(a=np.arange(6).reshape(2, 3), b='x'), dict(b='x', a=np.arange(6).reshape(3, 2).T)
  two['a'] = np.asfortranarray(one['a'])
  assert consistency.digest(one) == consistency.digest(two)
  assert consistency.digest(('copy', 1.5, None, True)) == 1189435403
