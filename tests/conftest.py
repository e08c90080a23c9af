"""Settings of every test: CPU, 8 virtual devices, strict rank promotion, a compilation cache, and a tier."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys

import quick

quick.prepare()
# Tests write a user's module again within a second, and its bytecode would count as that of the new text.
sys.dont_write_bytecode = True

import jax  # noqa: E402
import pytest  # noqa: E402
import tiers  # noqa: E402

HERE = pathlib.Path(__file__).parent

# Tests that need these use pytest.importorskip. With JAXRL_LLM_REQUIRE_PARITY=1 none may be skipped.
_PARITY = (
  'torch', 'transformers', 'trl', 'reasoning_gym', 'math_verify', 'jsonschema', 'moto', 'tensorboard', 'wandb',
)  # fmt: skip

# The longest files start first; otherwise one process would still work while the others are done.
_FIRST = (
  'test_train.py', 'test_faults.py', 'test_configs.py', 'test_processes.py', 'test_meshes.py', 'test_lora.py',
  'test_checkpoint.py', 'test_storage.py', 'test_multi_turn.py', 'test_alarms.py', 'test_math_verify.py',
  'test_launch.py',
  'test_host_step.py', 'test_update_methods.py', 'test_bad_config.py', 'test_step_methods.py',
  'test_demonstration_loss.py', 'test_step.py', 'test_parity.py', 'test_ring_decode.py',
)  # fmt: skip


def _tier(path: pathlib.Path, test: str = '') -> str:
  return tiers.tier(path.relative_to(HERE).as_posix(), test)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  for item in items:
    item.add_marker(_tier(item.path, item.name))
  place = {name: i for i, name in enumerate(_FIRST)}
  items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
  """`-m host` does not import the files of other tiers, which takes as long as the tests of the tier."""
  is_test = collection_path.name.startswith('test_') and collection_path.suffix == '.py'
  other = is_test and config.getoption('markexpr') == 'host' and _tier(collection_path) != 'host'
  return True if other else None


def pytest_configure(config: pytest.Config) -> None:
  for name in tiers.TIERS:
    config.addinivalue_line('markers', f'{name}: see tests/tiers.py')
  if not hasattr(config, 'workerinput'):  # once, and not in each process of pytest-xdist
    _require_parity()
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  quick.share_contexts()
  # Below .pytest_cache: a second run of the suite compiles next to nothing.
  if not os.environ.get('JAX_COMPILATION_CACHE_DIR') and hasattr(config, 'cache'):
    jax.config.update('jax_compilation_cache_dir', str(config.cache.mkdir('jax')))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  # Runs of the command keep their programs there, too.
  if hasattr(config, 'cache'):
    os.environ.setdefault('JAXRL_LLM_CACHE', str(config.cache.mkdir('runs')))


def _require_parity() -> None:
  """Fails the run if JAXRL_LLM_REQUIRE_PARITY=1 or JAXRL_LLM_REQUIRE_AOT=1 and a module of that kind does not
  import."""
  required = {'PARITY': _PARITY, 'AOT': ('libtpu',)}
  for kind, names in required.items():
    for name in names if os.environ.get(f'JAXRL_LLM_REQUIRE_{kind}') == '1' else ():
      try:
        importlib.import_module(name)
      except ImportError as error:
        raise pytest.UsageError(
          f'JAXRL_LLM_REQUIRE_{kind}=1, but {name} does not import ({error}); '
          "install the extras: pip install -e '.[gym,math,json,tensorboard,wandb,aot,dev,parity]'."
        ) from error
