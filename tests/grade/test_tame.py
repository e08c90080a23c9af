"""Tasks of reasoning-gym that evaluate answers: none runs one, and right answers are right as before."""

from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import pkgutil

import pytest

from jaxrl_llm.grade import graders, tame
from jaxrl_llm.types import Row

reasoning_gym = pytest.importorskip('reasoning_gym')

ATTACKS = (
  "__import__('os').system('touch {}')", "open('{}', 'w').write('x')", "[open('{}', 'w') for _ in [1]]",
  "(lambda: open('{}', 'w'))()", "f\"{{open('{}', 'w')}}\"", "x.func(open('{}', 'w'))",
  "exec(\"open('{}', 'w')\")", "eval(\"open('{}', 'w')\")", "[*map(open, ['{}'], ['w'])]",
)  # fmt: skip


def row_of(task, index=0):
  dataset = reasoning_gym.create_dataset(task, seed=1, size=3)
  entry = dataset[index]
  extra = dict(gym=dict(name=task, settings={}, answer=entry['answer']), metadata=entry['metadata'])
  return Row('1', entry['question'], (), str(entry['answer']), 'gym', extra), dataset, entry


@pytest.mark.parametrize('task', sorted(tame.EXPRESSIONS | tame.LITERALS))
def test_no_answer_is_run_and_right_ones_are_right(task, tmp_path):
  trap = tmp_path / 'trap'
  row, dataset, entry = row_of(task)
  nothing = dataset.score_answer(tame.UNREADABLE, entry)
  for attack in ATTACKS:
    assert graders.gym(attack.format(trap), row) == nothing < 1
    assert not os.path.exists(trap), attack
  for index in range(3):
    row, _, entry = row_of(task, index)
    assert graders.gym(str(entry['answer']), row) == 1.0


@pytest.mark.parametrize('task', ['countdown', 'spiral_matrix'])
def test_what_is_held_back_would_run(task, tmp_path):
  """Else the test above proves nothing."""
  _, dataset, entry = row_of(task)
  dataset.score_answer(ATTACKS[1].format(tmp_path / 'trap'), entry)
  assert (tmp_path / 'trap').exists()


# Modules that evaluate something, read through: it is their own text and never an answer.
OWN = {
  'algorithmic.number_sorting', 'arithmetic.basic_arithmetic', 'arithmetic.bitwise_arithmetic',
  'arithmetic.gsm_symbolic.generators_00_49', 'arithmetic.gsm_symbolic.generators_50_99', 'code.codeio',
  'logic.propositional_logic',
}  # fmt: skip
_CALLS = 'eval', 'exec', 'compile', 'parse_expr', 'sympify', 'parse_latex', '__import__', 'system'
_UNPICKLES = 'pickle.loads', 'pickle.load', 'yaml.load', 'marshal.loads'


def test_no_other_task_evaluates_anything():
  """Of a version with one more this fails: read its scorer, then put its module into a list."""
  tamed = {
    type(reasoning_gym.create_dataset(task, seed=0, size=1)).__module__
    for task in tame.EXPRESSIONS | tame.LITERALS
  }
  found = set()
  for module in pkgutil.walk_packages(reasoning_gym.__path__, 'reasoning_gym.'):
    source = pathlib.Path(importlib.util.find_spec(module.name).origin).read_text()
    calls = [n.func for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    plain = {ast.unparse(f) for f in calls}
    if plain & {*_CALLS, *_UNPICKLES} or any(p.split('.')[-1] in _CALLS[3:] for p in plain):
      found.add(module.name)
  assert found - {f'reasoning_gym.{name}' for name in OWN} == tamed
