"""What goldens of slime share: its loss functions in float64, on lists of rows, and means over rows or tokens.

The reductions over rows and devices are part of its Megatron backend; the mean over rows or tokens is written here.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from tests.objective.official import lib

UTILS, LOSS = 'slime/utils/ppo_utils.py', 'slime/backends/megatron_utils/loss.py'
MISMATCH = 'examples/train_infer_mismatch_helper/mis.py'
PINNED = ('THUDM/slime', '624b824a898ab0ec1fcb4d373004c7f3852bf515')
OFFICIAL = lib.Official(*PINNED, (UTILS, LOSS, MISMATCH), 'Apache-2.0')


@contextlib.contextmanager
def in_float64(torch: Any) -> Iterator[None]:
  """`x.float()` gives float64."""
  before = torch.Tensor.float
  torch.Tensor.float = torch.Tensor.double
  try:
    yield
  finally:
    torch.Tensor.float = before


def rows(x: types.SimpleNamespace, name: str) -> list[Any]:
  """The tokens of each row."""
  return [row[: int(n)] for row, n in zip(getattr(x, name), x.mask.sum(1).tolist(), strict=True)]


def masks(torch: Any, x: types.SimpleNamespace) -> list[Any]:
  """As many ones as a row has tokens."""
  return [torch.ones(int(n)) for n in x.mask.sum(1).tolist()]


def advantages(torch: Any, x: types.SimpleNamespace) -> list[Any]:
  """GRPO's of each row's tokens."""
  out = []
  for uid, reward, n in zip(x.uid, x.reward, x.mask.sum(1).tolist(), strict=True):
    group = x.reward[torch.tensor(x.uid == uid)]
    a = (reward - group.mean()) / (group.std() + 1e-6)
    out.append(a.expand(int(n)))
  return out


def clipped(torch: Any, utils: Any, x: types.SimpleNamespace, high: float = 0.2) -> Any:
  """slime's clipped loss of every token, one row after the other."""
  gap = torch.cat(rows(x, 'old')) - torch.cat(rows(x, 'logp'))
  a = torch.cat(advantages(torch, x))
  return utils.compute_policy_loss(gap, a, 0.2, high)[0]


def row_mean(torch: Any, x: types.SimpleNamespace, loss: Any) -> Any:
  """The mean over rows of the mean over their tokens."""
  lengths = [int(n) for n in x.mask.sum(1).tolist()]
  return torch.stack([part.mean() for part in torch.split(loss, lengths)]).mean()
