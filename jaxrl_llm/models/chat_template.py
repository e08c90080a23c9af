"""Chat templates: programs that come with a model, and are untrusted.

They run in jinja's sandbox without a loader, which keeps them from Python's objects. Before first use, a template
renders two sample conversations in a process with limits on time and memory. That finds templates that loop forever or
exhaust memory, except those that do so on other conversations only. This file is also the program of that process and
therefore imports nothing of the package.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_CPU_S, _WALL_S = 5, 120  # the wall limit is generous, for busy machines
_BYTES = 2**30
_SAMPLE_CONVERSATIONS = (
  [dict(role='user', content='2 + 2 = ?')],
  [
    dict(role='system', content='Be brief.'),
    dict(role='user', content='Hello.'),
    dict(role='assistant', content='Hello!'),
    dict(role='user', content='2 + 2 = ?'),
  ],
)


def render(template: str, messages: Sequence[Mapping[str, object]], **variables: Any) -> str:
  """The template applied to `messages`. Raises ValueError with a message for any failure."""
  try:
    text = _environment().from_string(template).render(messages=messages, **variables)
  except Exception as error:  # a template is a program and may raise anything
    raise ValueError(str(error) or type(error).__name__) from error
  if not isinstance(text, str):
    raise ValueError('its result is not text')
  return text


def find_problem(template: str, **variables: Any) -> str:
  """'' for a usable template, else a description of its problem.

  A template that raises for some conversations is usable: many accept no system message. `render` raises then.
  """
  try:
    _environment().parse(template)
  except Exception as error:
    return f'it is not a jinja template ({error})'
  if template == PLAIN:
    return ''
  from jaxrl_llm.models import untrusted

  request = dict(template=template, variables=variables)
  problem = untrusted.find_problem(
    __file__, request, cpu_s=_CPU_S, wall_s=_WALL_S, memory_bytes=_BYTES
  )
  return f'{problem} for a conversation of four lines' if problem else ''


def _environment() -> jinja2.Environment:
  def raise_exception(message):
    raise jinja2.TemplateError(message)

  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
  )
  env.filters['tojson'] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
  env.globals['raise_exception'] = raise_exception
  env.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  return env


def probe(request: dict[str, Any]) -> str:
  """Render both sample conversations; the limits of the process are the only check."""
  for messages in _SAMPLE_CONVERSATIONS:
    try:
      render(request['template'], messages, **request['variables'])
    except ValueError as error:
      if isinstance(error.__cause__, MemoryError):
        raise
  return ''
