"""What goldens of ROLL share: its policy losses as functions, and its normalization of rewards.

Its mean over tokens does not apply the mask to the losses; they are masked before it here.
"""

from __future__ import annotations

import ast
import types
from typing import Any

import numpy as np

from tests.objective.official import lib

WORKER, FUNCTIONALS = 'roll/pipeline/rlvr/actor_pg_worker.py', 'roll/utils/functionals.py'
OFFICIAL = lib.Official(
  'alibaba/ROLL',
  '8eb27cc2dc34c4d1310b169d9b86d339004d811a',
  (WORKER, FUNCTIONALS),
  'Apache-2.0',
)
WITHOUT = {'empty rows': 'its groups have one size'}


def draw(seed: int) -> dict[str, np.ndarray]:
  """As everywhere, without an empty row."""
  data = lib.draw(seed)
  data['length'][2] = 3
  return data


def loss(torch: Any, read: Any, name: str, settings: dict, *values: Any) -> Any:
  """The named method of its worker for policy gradients, with these settings."""
  worker = next(
    n for n in ast.parse(read(WORKER)).body if getattr(n, 'name', '') == 'ActorPGWorker'
  )
  method = next(n for n in worker.body if getattr(n, 'name', '') == name)
  fn = getattr(lib.functions(ast.unparse(method), (name,), torch=torch, agg_loss=_no_metric), name)
  holder = types.SimpleNamespace(
    pipeline_config=types.SimpleNamespace(**settings),
    logger=types.SimpleNamespace(info=lambda *_: None),
    _cached_metrics={},
    _kimi15_config_logged=True,
    _get_or_cache_config=lambda key, default: settings.get(key, default),
  )
  return fn(holder, *values)


def _no_metric(loss_mat: Any, **_: Any) -> Any:
  return loss_mat.sum()


def normalized(torch: Any, read: Any, x: types.SimpleNamespace, **how: Any) -> Any:
  """Advantages [rows, T] of its `reward_norm`."""
  code = lib.functions(read(FUNCTIONALS), ('reward_norm',), torch=torch)
  return code.reward_norm(x.reward, n_sample=lib.G, **how)[:, None] * x.mask


def token_mean(torch: Any, read: Any, x: types.SimpleNamespace, loss_BxT: Any) -> Any:
  """Its mean over tokens, of masked losses."""
  names = ('agg_loss', 'masked_mean', 'masked_sum')
  code = lib.functions(read(FUNCTIONALS), names, torch=torch)
  return code.agg_loss(loss_BxT * x.mask, x.mask, 'token-mean')
