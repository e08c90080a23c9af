"""Chat templates: programs that come with a model, and may be anybody's.

They run in jinja's sandbox, without a loader, and before that once as a trial in a process that can be killed: the
sandbox keeps them from Python's objects, and the trial finds those that would never end or fill the memory. The trial
knows two conversations; a template that misbehaves at other words than theirs is not found. This file is that
process's program, too, and so imports nothing of the package.
"""

from __future__ import annotations

import datetime
import json
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


def find_problem(template: str, **variables: Any) -> str:
  """'' for a template that can be used, else what is wrong with it. Source: none.

  A template may refuse a conversation (some know no system message): that is told when it happens.
  """
  try:
    _environment().parse(template)
  except Exception as error:
    return f'it is no jinja template ({error})'
  if template == PLAIN:
    return ''
  from jaxrl_llm.models import untrusted

  request = dict(template=template, variables=variables)
  wrong = untrusted.find_problem(__file__, request, cpu_s=_CPU_S, wall_s=_WALL_S, memory_bytes=_BYTES)
  return f'{wrong} for a conversation of four lines' if wrong else ''


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


def probe(request: dict[str, Any]) -> str:
  """Renders two conversations; that it ends within the limits is all that is asked."""
  for messages in _TRIALS:
    try:
      render(request['template'], messages, **request['variables'])
    except ValueError as error:
      if isinstance(error.__cause__, MemoryError):
        raise
  return ''
