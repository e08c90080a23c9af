"""Statements inside functions of CLPO's trainer, found by their text."""

from __future__ import annotations

import ast
from typing import Any

TRAINER = 'verl/trainer/ppo/ray_trainer.py'
ACTOR = 'verl/workers/actor/dp_actor.py'
PINNED = ('csuking/CLPO', 'cb77b569b14c374e3981ec26f71ca792b1622298')
HARD, MEDIUM = 0.3, 0.7  # of scripts/clpo_qwen3_8b.sh


def statement(text: str, kind: type, contains: str) -> ast.stmt:
  """The shortest statement of a kind with `contains` in its text."""
  found = [
    n for n in ast.walk(ast.parse(text)) if isinstance(n, kind) and contains in ast.unparse(n)
  ]
  if not found:
    raise ValueError(f'the official file has no statement with {contains!r}.')
  return min(found, key=lambda n: len(ast.unparse(n)))


def run(node: ast.stmt, **namespace: Any) -> dict[str, Any]:
  """The names after a statement that sees `namespace` alone."""
  exec(compile(ast.Module([node], []), '<official>', 'exec'), namespace)
  return namespace
