"""Every command in a README or in the header of a config has flags and fields that exist."""

from __future__ import annotations

import math
import pathlib
import re
import shlex

import pytest

from jaxrl_llm.commands import compile_report, flags, sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = re.compile(r'python\S* -m jaxrl_llm\.main (.*)')
# Placeholders for a user's folders and modules.
PLACES = ('FOLDER', 'my_module', 'my_task')
# Written by the README's example; test_readme.py runs it.
OWN_CONFIG = '--config=my_task.py'


def lines_of(text: str) -> list[str]:
  """Lines, each joined with its continuation lines."""
  return re.sub(r'\\\n\s*', ' ', text).splitlines()


def readme() -> list[str]:
  """Arguments of every command in shell blocks of the READMEs; a line of flags alone belongs to configs/dapo.py."""
  files = [ROOT / 'README.md', *sorted(ROOT.glob('*/**/README.md'))]
  texts = [
    path.read_text() for path in files if not path.relative_to(ROOT).parts[0].startswith('.')
  ]
  blocks = [block for text in texts for block in re.findall(r'```sh\n(.*?)```', text, re.S)]
  found = []
  for line in (line for block in blocks for line in lines_of(block)):
    if command := COMMAND.search(line):
      found.append(command[1])
    elif line.startswith('--'):
      found.append(f'--config=configs/dapo.py {line}')
    elif line.startswith(('BUCKET', 'launch/')) and '--config=' in line:
      found.append(line[line.index('--config=') :])
  return [command for command in found if OWN_CONFIG not in command]


def headers() -> list[str]:
  """Arguments of every command in the docstrings of configs/."""
  found = []
  for path in sorted((ROOT / 'configs').rglob('*.py')):
    header = path.read_text().split('"""')[1]
    found += [command[1] for line in lines_of(header) if (command := COMMAND.search(line))]
  return found


def taken(command: str) -> None:
  """Raises SystemExit or UserError where a flag, a mode, a field or a combination does not exist."""
  argv = shlex.split(re.sub(r'\s+\(.*?\)\s*$', '', command), comments=True)
  arguments, overrides = flags.parse(argv)
  config = configs.load(arguments.config, [o for o in overrides if not any(p in o for p in PLACES)])
  config.model = 'scratch'
  if config.objective.teacher:
    config.objective.teacher = 'scratch'
  if config.rollout.early_exit.fn == 'text':  # needs a tokenizer, and no model is loaded
    config.rollout.early_exit.fn = 'none'
    del config.rollout.early_exit.text
  sizes = [config.mesh[axis] for axis in sharding.AXES]
  count = math.prod(n for n in sizes if n > 0)
  compile_report.make(config, [sharding_report.Device(i) for i in range(count)])


def test_there_are_commands_to_look_at():
  assert len(readme()) >= 12 and len(headers()) > 100


@pytest.mark.parametrize('command', readme())
def test_the_readmes_commands_are_taken(command, monkeypatch):
  monkeypatch.chdir(ROOT)
  taken(command)


@pytest.mark.parametrize('command', headers())
def test_the_headers_commands_are_taken(command, monkeypatch):
  monkeypatch.chdir(ROOT)
  taken(command)
