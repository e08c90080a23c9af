"""What joining the other processes sets for this one."""

from __future__ import annotations

import argparse

import jax
import pytest

from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.config import loading

ALONE = argparse.Namespace(coordinator=None, processes=1, process=None)


@pytest.fixture
def folder_of_programs():
  kept = jax.config.jax_compilation_cache_dir
  least = jax.config.jax_persistent_cache_min_compile_time_secs
  yield lambda: jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', kept)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', least)


def test_compiled_programs_are_kept_where_the_environment_says(monkeypatch, folder_of_programs):
  monkeypatch.setenv('JAXRL_LLM_CACHE', '/ours')
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  Processes().join(ALONE, loading.load('tiny', []))
  assert folder_of_programs() == '/ours/compiled'
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', '/mounted')
  Processes().join(ALONE, loading.load('tiny', []))
  assert folder_of_programs() == '/mounted'
