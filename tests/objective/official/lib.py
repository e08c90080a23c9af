"""Goldens from official code: how one is made from a clone, and how the project's coefficients are compared with it.

One script per method, `tests/objective/official/NAME.py`, run as

  python -m tests.objective.official.NAME --repository=PATH        (needs torch)

It reads the official functions' source at the commit that it names, runs them in float64 on random tensors of stated
seeds, and writes NAME.json. No official code is part of the project. A script has

  OFFICIAL   lib.Official: where the code comes from
  SETTINGS   stages of config.objective that reproduce it
  official   (torch, read, data) → outputs: 'gradient' of the loss with respect to the log-probs, and 'loss';
             `read(path)` gives the text of a file, `lib.functions` its functions
  MUTANTS    name → (module of the project, text in it, replacement): each must make the comparison fail
  SEEDS      optional, (0,) by default
  draw       optional, seed → data; `lib.draw` by default
  WITHOUT    optional, edge → why its draws lack it; see the test
  IDLE       optional, 'stage.keyword' that the gradient does not depend on; 'ratio' where it may be upside down
  ours       optional, data → the same outputs by the project; `gradient(SETTINGS, data)` by default

and ends with `lib.main(__name__)`. tests/objective/test_official.py finds every script and compares.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import json
import pathlib
import subprocess
import sys
import types
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.config import loading as configs
from jaxrl_llm.types import Batch, Prompts, Rollout, Turns

FOLDER = pathlib.Path(__file__).parent
P, G, T = 5, 4, 6
B = P * G
# (row, token) → log π − log π_old where `draw` sets it: half in rows with a right answer, half in rows with a wrong one
FAR = {
  **{(0, 1): 2.0, (0, 2): -2.0, (8, 1): 1.3, (8, 2): -1.3, (17, 0): 0.6, (17, 1): -0.7},
  **{(1, 0): 2.0, (3, 0): -2.0, (9, 0): 1.3, (10, 0): -1.3, (11, 0): 0.6, (16, 1): -0.7},
}


class Official(NamedTuple):
  """Where official code is: a public repository, one of its commits, and files in it."""

  repository: str  # owner/name on GitHub
  commit: str  # 40 hex digits
  paths: tuple[str, ...]
  license: str  # SPDX, or 'none stated'


def draw(seed: int) -> dict[str, np.ndarray]:
  """Random tensors of P groups of G rows, four decimals each.

  Rows of every age from 0 to 4 minibatches, whose ratios go beyond all usual bounds on both sides and for both signs of
  the advantage; one empty row, several truncated ones (length T); group 1 is all right, group 3 all wrong.
  """
  r = np.random.default_rng(seed)
  length_B = r.integers(1, T + 1, B)
  length_B[[0, 2 * G, 4 * G + 1]] = T
  length_B[2] = 0
  correct_B = r.integers(0, 2, B).astype(float)
  for group, values in enumerate(([1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0])):
    correct_B[group * G : group * G + G] = values
  correct_B[4 * G : 4 * G + 2] = [0, 1]
  age_B = np.arange(B) % 5
  logp_BxT = np.log(r.uniform(0.03, 0.9, (B, T)))
  drift_BxT = 0.25 * age_B[:, None] * r.normal(size=(B, T))
  for place, gap in FAR.items():
    drift_BxT[place] = gap
  old_BxT = logp_BxT - drift_BxT
  arrays = dict(
    logp=logp_BxT,
    old=old_BxT,
    behavior=old_BxT + 0.2 * r.normal(size=(B, T)),
    reference=logp_BxT + 0.4 * r.normal(size=(B, T)),
    entropy=r.uniform(0, 2, (B, T)),
    process=0.3 * r.normal(size=(B, T)),
  )
  return dict(
    {name: np.round(x, 4) for name, x in arrays.items()},
    length=length_B,
    age=age_B,
    correct=correct_B,
    reward=correct_B.copy(),
  )


def mask(data: dict) -> np.ndarray:
  """1 for tokens of rows, [B, T]."""
  return (np.arange(data['logp'].shape[1])[None] < data['length'][:, None]).astype(float)


def tensors(torch: Any, data: dict) -> types.SimpleNamespace:
  """The data as float64 tensors without the empty rows, which official batches do not have.

  `logp` collects a gradient, `uid` numbers groups as verl wants them, `exists` says which rows of the data these are.
  """
  exists_B = data['length'] > 0
  give = {
    k: torch.tensor(np.asarray(v)[exists_B], dtype=torch.float64)
    for k, v in data.items()
    if np.ndim(v)
  }
  out = types.SimpleNamespace(**give)
  out.mask = torch.tensor(mask(data)[exists_B])
  out.uid = (np.arange(len(exists_B)) // G)[exists_B]
  out.exists = exists_B
  out.logp.requires_grad_()
  return out


def turn_ends(data: dict) -> np.ndarray:
  """1 at the last token of each turn, [B, T]."""
  mask_BxT = mask(data)
  goes_on_BxT = np.zeros_like(mask_BxT)
  goes_on_BxT[:, :-1] = (data['turn'][:, 1:] == data['turn'][:, :-1]) * mask_BxT[:, 1:]
  return mask_BxT * (1 - goes_on_BxT)


def turns(torch: Any, x: types.SimpleNamespace) -> tuple[list[int], list[int], Any]:
  """Row and number of each turn, and its tokens [turns, T]: official code has a row for each call of the model."""
  row, number = [], []
  for b, (turn_T, mask_T) in enumerate(zip(x.turn, x.mask, strict=True)):
    count = int(turn_T[mask_T > 0].max()) + 1
    row, number = row + [b] * count, number + [*range(count)]
  own_RxT = torch.stack([x.mask[b] * (x.turn[b] == k) for b, k in zip(row, number, strict=True)])
  return row, number, own_RxT


def outputs(x: types.SimpleNamespace, loss: Any, scale: Any = 1.0) -> dict[str, Any]:
  """Loss and gradient [B, T], zero for empty rows.

  `scale` takes a small constant out of the official denominators (verl adds 1e-8 to some): the gradient is
  multiplied by it; a number or [rows, 1].
  """
  loss.backward()
  gradient_BxT = np.zeros(x.exists.shape + x.logp.shape[1:])
  gradient_BxT[x.exists] = (x.logp.grad * scale).numpy()
  return dict(loss=float(loss.detach()), gradient=gradient_BxT)


def functions(text: str, names: tuple[str, ...], **namespace: Any) -> types.SimpleNamespace:
  """The named functions and classes of a module's text, without decorators, that see `namespace` alone as globals."""
  tree = ast.parse(text)
  wanted = [n for n in tree.body if getattr(n, 'name', None) in names]
  missing = set(names) - {n.name for n in wanted}
  if missing:
    raise ValueError(f'the official file has no {sorted(missing)}.')
  for node in wanted:
    node.decorator_list = []
  flags = __future__.annotations.compiler_flag  # its type hints name what is not loaded
  code = compile(ast.Module(wanted, []), '<official>', 'exec', flags=flags, dont_inherit=True)
  exec(code, namespace)
  return types.SimpleNamespace(**{name: namespace[name] for name in names})


def method(text: str, owner: str, name: str, **namespace: Any) -> Any:
  """A method of a class of a module's text as a function of `self`, like `functions`."""
  (found,) = (
    n
    for c in ast.parse(text).body
    if isinstance(c, ast.ClassDef) and c.name == owner
    for n in c.body
    if getattr(n, 'name', None) == name
  )
  return getattr(functions(ast.unparse(found), (name,), **namespace), name)


def branch(text: str, test: str) -> Any:
  """Code of the statements under the first `if test:` of a module's text, for `exec` with what they read."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.If) and ast.unparse(node.test) == test:
      return compile(ast.Module(node.body, []), '<official>', 'exec')
  raise ValueError(f'the official file has no `if {test}`.')


def settings(changes: dict) -> Any:
  """`config.objective` with the stages of `changes`."""
  c = configs.default().objective
  for stage, value in changes.items():
    c[stage] = dict(fn=value) if isinstance(value, str) else value
  return c


def batch(data: dict, needs_old: bool) -> Batch:
  """The data as a batch: sampled by `behavior` where a method scores the old policy, else by the old policy itself.

  Data with `turn`, of every token, has the reward `paid` at the last token of each; `context` is that of its prompts.
  Tokens are 0 without `tokens`.
  """
  rows, columns = data['logp'].shape
  tokens_BxT = np.asarray(data.get('tokens', np.zeros((rows, columns))), np.int32)
  rollout = Rollout(
    tokens_BxT,
    data['behavior' if needs_old else 'old'],
    data['length'],
    np.ones(rows, np.int8),
    np.zeros((rows, columns), np.int32),
    np.ones(rows),
    np.zeros((rows, 0)),
    turns_of(data) if 'turn' in data else None,
  )
  groups = rows // G
  prompts = Prompts(
    np.zeros((groups, 2), np.int32),
    np.full(groups, 2, np.int32),
    *[np.arange(groups)] * 2,
    np.zeros(groups),
  )
  if 'context' in data:
    prompts = prompts._replace(context_P=data['context'])
  return Batch(prompts, rollout, data['reward'], data['correct'])


def turns_of(data: dict) -> Turns:
  """The turns of the data; without `state`, none from the same one."""
  number_BxT = np.where(mask(data) > 0, data['turn'], -1).astype(np.int32)
  state_BxT = data.get('state', np.arange(number_BxT.size).reshape(number_BxT.shape))
  return Turns(number_BxT, data['paid'], state_BxT, np.zeros(len(number_BxT), np.int8))


def gradient(changes: dict, data: dict) -> dict[str, np.ndarray]:
  """Gradient of the project's loss with respect to the log-probs: minus the coefficients."""
  method = objective.method(settings(changes))
  signal_BxT = data['process'] if method.auxiliary_model is not None else None
  policies = objective.OtherPolicies(
    data['old'] if method.needs_old else None,
    data['reference'] if method.needs_reference else None,
  )
  rows = batch(data, method.needs_old)
  target = objective.targets(method, rows, G, signal_BxT, policies=policies)
  c_BxT, _ = objective.coefficients(method, target, data['logp'], data['entropy'])
  return dict(gradient=-np.asarray(c_BxT))


def compare(script: types.ModuleType, golden: dict) -> float:
  """The largest difference from the golden, relative to the largest value of each output; NaN counts as infinite."""
  worst = 0.0
  for stored in golden['draws']:
    data = {k: np.asarray(v) for k, v in stored['inputs'].items()}
    own = getattr(script, 'ours', lambda d: gradient(script.SETTINGS, d))(data)
    for name, value in own.items():
      want = np.asarray(stored['outputs'][name])
      gap = np.abs(np.asarray(value) - want).max() / np.abs(want).max()
      worst = max(worst, float(gap)) if np.isfinite(gap) else np.inf
  return worst


def main(module: str) -> None:
  """Runs the official code from a clone and writes the golden beside the script."""
  if module != '__main__':
    return
  import torch

  script = sys.modules['__main__']
  parser = argparse.ArgumentParser(description=script.__doc__)
  parser.add_argument(
    '--repository', required=True, help='a clone or bare mirror of the official one'
  )
  where = parser.parse_args().repository
  official = script.OFFICIAL

  def read(path: str) -> str:
    assert path in official.paths, path
    name = f'{official.commit}:{path}'
    return subprocess.run(
      ['git', '-C', where, 'show', name], check=True, capture_output=True, text=True
    ).stdout

  torch.set_default_dtype(torch.float64)
  draws = []
  for seed in getattr(script, 'SEEDS', (0,)):
    data = getattr(script, 'draw', draw)(seed)
    result = script.official(torch, read, data)
    draws.append(dict(seed=seed, inputs=plain(data), outputs=plain(result)))
  out = pathlib.Path(script.__file__).with_suffix('.json')
  out.write_text(json.dumps(official._asdict() | dict(draws=draws), separators=(',', ':')) + '\n')
  print(f'{out.name}: {len(draws)} draws')


def plain(x: dict) -> dict:
  """Arrays as lists."""
  return {k: np.asarray(v).tolist() for k, v in x.items()}
