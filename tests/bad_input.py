"""The command up to where it would compile, for tests of bad input: `outcome(...)` is its status and its sentence."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator
from unittest import mock

import hypothesis
import tiny_job

from jaxrl_llm import grade, main, outer, train, workdir
from jaxrl_llm.control import (
  allocate,
  candidates,
  choose,
  domain,
  forget,
  gate,
  hint,
  labels,
  share,
  utility,
  value,
)  # fmt: skip
from jaxrl_llm.generate import branching, cap, exits, order, prune, speculate, stopping
from jaxrl_llm.grade import graders, vote
from jaxrl_llm.models import decoder
from jaxrl_llm.objective import (
  advantage,
  aggregate,
  auxiliary,
  companion,
  correction,
  credit,
  distill,
  emphasis,
  kl,
  lr_scale,
  perturb,
  proximal,
  ratio,
  shape,
  tilt,
  trust,
)  # fmt: skip
from jaxrl_llm.replay import collect, successes

# Deterministic, so that a test cannot fail for a reason that the change before it does not have.
SETTINGS = dict(
  derandomize=True, deadline=None, database=None, print_blob=False,
  suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip

# Which module the `fn` of a field names a function of.
STAGES = {
  **{f'objective.{m.__name__.rpartition(".")[2]}': m for m in (
    advantage, aggregate, auxiliary, companion, correction, credit, distill, emphasis, kl,
    lr_scale, perturb, proximal, ratio, shape, tilt, trust,
  )},
  **{f'curriculum.{m.__name__.rpartition(".")[2]}': m for m in (
    allocate, candidates, domain, forget, gate, share, utility, value,
  )},
  **{f'generate.{m.__name__.rpartition(".")[2]}': m for m in (cap, order, prune)},
  'curriculum.pick': choose, 'generate.stop': stopping, 'generate.draft': speculate,
  'generate.exit': exits, 'generate.tree': branching, 'optimizer.outer': outer,
  'grade': graders, 'vote': vote, 'labels': labels, 'truncate': grade.truncate, 'hint': hint,
  'collect': collect, 'replay': successes,
}  # fmt: skip


def job(**changes) -> dict:
  """The smallest job; no warm start."""
  data = dict(tiny_job.CONFIG['data'], size=16)
  small = tiny_job.CONFIG | dict(sft=dict(steps=0), data=data, prompts=4)
  return small | changes


def laid(tree: dict, field: str, value) -> dict:
  """A copy of a tree with `value` at 'a.b.c'; an Ellipsis takes the field away."""
  first, _, rest = field.partition('.')
  below = tree.get(first)
  new = laid(below if isinstance(below, dict) else {}, rest, value) if rest else value
  out = {k: v for k, v in tree.items() if k != first}
  return out if new is ... else out | {first: new}


def settings_of(fn) -> list[inspect.Parameter]:
  return [p for p in inspect.signature(fn).parameters.values() if p.kind == p.KEYWORD_ONLY]


def written(value) -> str:
  """Python for a value: nan and inf have no literal."""
  if isinstance(value, dict):
    return '{' + ', '.join(f'{k!r}: {written(v)}' for k, v in value.items()) + '}'
  if isinstance(value, list | tuple):
    left, right = '[]' if isinstance(value, list) else ('(', ',)' if value else ')')
    return left + ', '.join(map(written, value)) + right
  if isinstance(value, float) and not math.isfinite(value):
    return f"float('{value}')"
  return repr(value)


@contextlib.contextmanager
def up_to_compiling() -> Iterator[None]:
  """Nothing is compiled, drawn or trained; all before that is real."""
  drawn = lambda config, seed: decoder.abstract_params(config)  # noqa: E731
  with contextlib.ExitStack() as stack:
    for where, name, stub in (
      (train, '_loop', lambda *a: {}),
      (decoder, 'init', drawn),
      (workdir, '_git_revision', lambda folder: None),
    ):
      stack.enter_context(mock.patch.object(where, name, stub))
    yield


def outcome(config: dict, *overrides: str) -> tuple[int, str]:
  """What `main` returns for a config file of that body, and what it prints to standard error."""
  err = io.StringIO()
  with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(err):
    path = pathlib.Path(folder, 'c.py')
    path.write_text(
      f'def get_config():\n  return {written(config)}\n',
      encoding='utf-8',
      errors='backslashreplace',
    )
    try:
      code = main.main([f'--config={path}', f'--workdir={folder}/run', *overrides])
    except SystemExit as stop:  # argparse
      code = stop.code
    return code, err.getvalue().replace(os.fspath(folder), '')


def sentence(code: int, text: str) -> str:
  """The one sentence of a refusal; fails where it is not one, or is a traceback. '' where all was well."""
  lines = [line for line in text.splitlines() if line.startswith('error:')]
  assert 'Traceback' not in text, text
  assert code in (0, 2), (code, text)
  if code == 0:
    assert not lines, text
    return ''
  assert len(lines) == 1 and text.rstrip().endswith(lines[0].rstrip()), text
  assert lines[0].endswith('.'), text
  return lines[0].removeprefix('error: ')
