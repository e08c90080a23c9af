"""The lowered program of every config is the one that was pinned: tests/programs.json holds a hash of its StableHLO.

A change of the programs that is meant is recorded by `python tests/test_programs.py`, with the reason in the commit.
Locations and names of functions are left out, so that renaming and moving code changes no hash. The text depends on
jax's version; the test skips with another.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
if __name__ == '__main__':
  sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
  import quick

  quick.prepare()

import jax  # noqa: E402
import pytest  # noqa: E402
import test_configs  # noqa: E402

from jaxrl_llm import step as steps  # noqa: E402
from jaxrl_llm.commands import compile_report  # noqa: E402
from jaxrl_llm.distributed import sharding  # noqa: E402
from jaxrl_llm.runner import setup  # noqa: E402

FILE = pathlib.Path(__file__).with_name('programs.json')
PINNED = json.loads(FILE.read_text()) if FILE.exists() else dict(jax='', programs={})


def canonical(text: str) -> str:
  """StableHLO without the names of results and with functions numbered in their order."""
  text = re.sub(r'jax\.(?:result|arg)_info = "[^"]*"', '', text)
  numbers: dict[str, str] = {}
  return re.sub(r'@[\w.$"-]+', lambda m: numbers.setdefault(m[0], f'@f{len(numbers)}'), text)


def digest(name: str, folder: pathlib.Path) -> str:
  """The hash of the step of a config at the sizes of tests/test_configs.py, on one device."""
  config = test_configs.small(name, folder)
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  spec = setup.build_context(config, mesh).spec
  lowered = steps.compile_step(spec).lower(*compile_report.arguments(spec))
  return hashlib.sha256(canonical(lowered.as_text()).encode()).hexdigest()


def test_every_config_is_pinned():
  assert set(PINNED['programs']) == set(test_configs.FILES)


@pytest.mark.parametrize('name', sorted(PINNED['programs']))
def test_the_program_of_a_config_is_the_pinned_one(name, tmp_path):
  if jax.__version__ != PINNED['jax']:
    pytest.skip(f'hashes are of jax {PINNED["jax"]}, this is {jax.__version__}')
  assert digest(name, tmp_path) == PINNED['programs'][name]


def test_another_program_has_another_hash():
  """What the hash leaves out is names alone."""
  texts = [
    jax.jit(fn).lower(1.0).as_text() for fn in (lambda x: x + 1, lambda y: y + 1, lambda x: x + 2)
  ]
  one, same, other = map(canonical, texts)
  assert one == same != other


if __name__ == '__main__':
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  found = {name: digest(name, pathlib.Path(tempfile.mkdtemp())) for name in test_configs.FILES}
  FILE.write_text(json.dumps(dict(jax=jax.__version__, programs=found), indent=1) + '\n')
