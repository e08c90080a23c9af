"""Memory and seconds of a step for the models of launch/*.ipynb, in the notebooks and in launch/README.md.

python tests/notebook_estimates.py [PART ...]   compiles the rows whose names hold a PART, all without one, and writes
python tests/notebook_estimates.py --write      writes the tables of notebook_estimates.json again

A row is a report of --mode=compile with the notebook's own flags: minutes of compilation, without a TPU (extra `aot`).
"""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / 'launch'
RECORDS = pathlib.Path(__file__).with_suffix('.json')
MARKS = (
  '<!-- estimates: python tests/notebook_estimates.py -->\n',
  '<!-- end of estimates -->',
)
# Settings that change neither memory nor time of the compiled step.
_OTHERS = ('steps', 'data.', 'rewards.', 'evaluation.', 'objective.', 'optimizer.', 'lora.alpha')
_HEADER = (
  '| model | trained | device | GiB a chip, of {hbm_gib} | rollout, s | update, s | step, s |\n'
  '|---|---|---|---|---|---|---|\n'
)
_NOTE = (
  'Compiled for {topology} without a TPU and not timed. Memory is that of the compiled step of a chip. Seconds are a\n'
  "lower bound by the vendor's figures, one resource after the other, for completions {lengths}.\n"
  'jax {jax}, libtpu {libtpu}.\n'
)


class Row(NamedTuple):
  """One compilation: its name, the notebook, the columns of the table, and the flags of the command."""

  name: str
  notebook: str
  model: str
  trained: str
  topology: str
  lengths: str  # --lengths; '' = all completions have the tokens of the cap
  flags: tuple[str, ...]


def rows() -> list[Row]:
  """The rows of both notebooks, by their present cells."""
  settings = literals('kaggle.ipynb', 'settings')
  changes = settings['SETTINGS'] | settings['ADAPTER']
  model = settings['MODEL']
  kaggle = Row(
    f'kaggle {model}', 'kaggle.ipynb', model, 'adapter', 'v5e-8', '200,0.5', _flags('dapo', model, changes)
  )  # fmt: skip
  default = 'HuggingFaceTB/SmolLM2-135M-Instruct'
  flags = _flags('dapo', default, {})
  return [kaggle, Row(f'colab {default}', 'colab.ipynb', default, 'weights', 'v5e-1', '', flags)]


def literals(notebook: str, cell: str) -> dict:
  """The constants that a cell assigns."""
  cells = {c['id']: c for c in json.loads((LAUNCH / notebook).read_text())['cells']}
  found = {}
  for statement in ast.parse(''.join(cells[cell]['source'])).body:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
      try:
        found[statement.targets[0].id] = ast.literal_eval(statement.value)
      except ValueError:  # an expression
        continue
  return found


def _flags(config: str, model: str, settings: dict) -> tuple[str, ...]:
  compiled = {k: v for k, v in settings.items() if not k.startswith(_OTHERS)}
  overrides = ({'model': model} | compiled).items()
  return (f'--config={config}', *(f'--config.{name}={value}' for name, value in overrides))


def compiled(row: Row) -> dict:
  """The report of --mode=compile with the flags of the row."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'report.json'
    command = [sys.executable, '-m', 'jaxrl_llm.main', '--mode=compile', f'--report={path}']
    command += [f'--topology={row.topology}', f'--lengths={row.lengths}', *row.flags]
    status = subprocess.run(command, cwd=ROOT).returncode
    assert status in (0, 1), f'the compilation ended with status {status}'  # 1: with a problem
    return json.loads(path.read_text())


def record(row: Row, report: dict) -> dict:
  """The settings of a row with the numbers of its report."""
  part, step = report['parts']['fused'], report['step']
  decode_s = step['decode_serial_s'] + step['prefill_s']
  return dict(
    settings=json.loads(json.dumps(row._asdict())),
    memory_gib=(part['peak_bytes'] + part['code_bytes']) / 2**30,
    hbm_gib=report['hbm_gib'],
    decode_s=decode_s,
    update_s=step['serial_s'] - decode_s,
    step_s=step['serial_s'],
    versions=report['versions'],
  )


def table(records: dict, notebook: str) -> str:
  """The table of a notebook with its note."""
  own = [r for r in records.values() if r['settings']['notebook'] == notebook]
  cells = [
    [r['settings'][n] for n in ('model', 'trained', 'topology')]
    + [f'{r["memory_gib"]:.1f}', *(f'{r[n]:.2f}' for n in ('decode_s', 'update_s', 'step_s'))]
    for r in own
  ]
  lines = [f'| {" | ".join(row)} |\n' for row in cells]
  first = own[0]
  mean, _, sigma = first['settings']['lengths'].partition(',')
  lengths = (
    f'of {mean} tokens on average (log-normal, σ {sigma})'
    if mean
    else 'that all end at their limit'
  )
  topology = first['settings']['topology']
  note = _NOTE.format(topology=topology, lengths=lengths, **first['versions'])
  return f'\n{_HEADER.format(**first)}{"".join(lines)}\n{note}'


def inserted(text: str, new: str) -> str:
  """`text` with `new` between the marks."""
  before, _, rest = text.partition(MARKS[0])
  _, mark, after = rest.partition(MARKS[1])
  assert mark, f'the marks {MARKS} are missing'
  return before + MARKS[0] + new + mark + after


def texts(records: dict) -> dict[pathlib.Path, str]:
  """Each generated file with its tables."""
  notebooks = ('colab.ipynb', 'kaggle.ipynb')
  readme = LAUNCH / 'README.md'
  both = ''.join(table(records, name) for name in notebooks)
  return {readme: inserted(readme.read_text(), both)} | {
    LAUNCH / name: _notebook(LAUNCH / name, table(records, name)) for name in notebooks
  }


def _notebook(path: pathlib.Path, new: str) -> str:
  content = json.loads(path.read_text())
  (cell,) = [c for c in content['cells'] if MARKS[0] in c['source']]
  cell['source'] = inserted(''.join(cell['source']), new).splitlines(keepends=True)
  return json.dumps(content, indent=1, ensure_ascii=False) + '\n'


def main() -> None:
  records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
  parts = sys.argv[1:]
  present = rows()
  for row in present:
    if '--write' not in parts and (not parts or any(part in row.name for part in parts)):
      records[row.name] = record(row, compiled(row))
      ordered = {r.name: records[r.name] for r in present if r.name in records}
      RECORDS.write_text(json.dumps(ordered, indent=1) + '\n')
  for path, text in texts(json.loads(RECORDS.read_text())).items():
    path.write_text(text)


if __name__ == '__main__':
  main()
