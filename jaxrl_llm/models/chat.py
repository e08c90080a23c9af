"""Chat templates: programs that come with a model, and may be anybody's.

They run in jinja's sandbox, without a loader, and before that once as a trial in a process that can be killed: the
sandbox keeps them from Python's objects, and the trial finds those that would never end or fill the memory. The trial
knows two conversations; a template that misbehaves at other words than theirs is not found. This file is that
process's program, too, and so imports nothing of the package.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_CPU_S, _WALL_S = 5, 120  # a busy machine may be slow; what is counted first is the work
_BYTES = 2**30
_TRIALS = (
  [dict(role='user', content='2 + 2 = ?')],
  [
    dict(role='system', content='Be brief.'),
    dict(role='user', content='Hello.'),
    dict(role='assistant', content='Hello!'),
    dict(role='user', content='2 + 2 = ?'),
  ],
)


def render(template: str, messages: list[dict], **variables: Any) -> str:
  """The template applied to `messages`. Raises ValueError, in words, for whatever goes wrong. Source: none."""
  try:
    text = _environment().from_string(template).render(messages=messages, **variables)
  except Exception as error:  # a template is a program: anything may come
    raise ValueError(str(error) or type(error).__name__) from error
  if not isinstance(text, str):
    raise ValueError('it gives no text')
  return text


def fault(template: str, **variables: Any) -> str:
  """'' for a template that can be used, else what is wrong with it. Source: none.

  A template may refuse a conversation (some know no system message): that is told when it happens.
  """
  try:
    _environment().parse(template)
  except Exception as error:
    return f'it is no jinja template ({error})'
  if template == PLAIN:
    return ''
  told = json.dumps([template, variables, _CPU_S])
  try:
    done = subprocess.run(
      [sys.executable, '-I', __file__], input=told, capture_output=True, text=True, timeout=_WALL_S
    )
  except subprocess.TimeoutExpired:
    return f'it takes longer than {_WALL_S} s for a conversation of four lines'
  if done.returncode:
    return (
      f'it takes more than {_CPU_S} s or {_BYTES / 2**30:.0f} GiB for a conversation of four lines'
    )
  return ''


def _environment() -> jinja2.Environment:
  def refuse(message):
    raise jinja2.TemplateError(message)

  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
  )
  env.filters['tojson'] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
  env.globals['raise_exception'] = refuse
  env.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  return env


def _trial() -> None:
  """Renders what standard input tells, within limits; ends with status 0 unless these are crossed."""
  import resource

  template, variables, cpu_s = json.load(sys.stdin)
  resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
  resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
  for messages in _TRIALS:
    try:
      render(template, messages, **variables)
    except ValueError as error:
      if isinstance(error.__cause__, MemoryError):
        raise


if __name__ == '__main__':
  _trial()
