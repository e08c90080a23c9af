"""Reinforcement learning with verifiable rewards for language models, natively in JAX.

The public API is loaded on first use, so that `import jaxrl_llm` imports no jax: grading workers own no device.

  jaxrl_llm.run(jaxrl_llm.load_config('configs/dapo.py', ['--config.steps=10']), 'runs/dapo')
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

# Public name → (module, attribute).
_API = {
  'Config': ('config.schema', 'Config'),
  'Curriculum': ('curriculum', 'Curriculum'),
  'UserError': ('types', 'UserError'),
  'coefficients': ('objective', 'coefficients'),
  'default_config': ('config.loading', 'default'),
  'forward': ('models', 'forward'),
  'load_config': ('config.loading', 'load'),
  'load_model': ('models', 'load'),
  'run': ('train', 'run'),
  'sample': ('rollout', 'sample'),
  'score': ('rewards', 'score'),
}
# Packages whose functions are public under their own names: jaxrl_llm.models.load, jaxrl_llm.rewards.score, ...
_MODULES = ('config', 'curriculum', 'models', 'objective', 'rewards', 'rollout', 'train', 'types')

__all__ = ['__version__', *_API, *_MODULES]

try:
  __version__ = importlib.metadata.version('jaxrl_llm')
except importlib.metadata.PackageNotFoundError:  # run from a checkout
  __version__ = '0.0.0+unknown'


def __getattr__(name: str) -> Any:
  if name in _API:
    module, attribute = _API[name]
    return getattr(importlib.import_module(f'{__name__}.{module}'), attribute)
  if name in _MODULES:
    return importlib.import_module(f'{__name__}.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
