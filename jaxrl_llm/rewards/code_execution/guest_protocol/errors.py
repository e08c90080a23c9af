"""Errors of rows, and the common parts of stand-ins for errors of the program."""

from __future__ import annotations

from jaxrl_llm.rewards.code_execution.guest_protocol.wire import Value


class RowError(BaseException):
  """The tests do something unsupported. A BaseException, so that no test's `except Exception` catches it."""


class ProgramError(Exception):
  """The stand-in for an error that ends programs, or that cannot be constructed here."""


def error_space() -> dict[str, Value]:
  """The namespace of stand-ins for error classes, in place of the methods of Object."""

  def __str__(self: Value) -> str:
    return self._error_text

  def __getattr__(self: Value, name: str) -> Value:
    if name == '_error_text':
      return ''
    return type(self)._link.request('__getattr__', self, name)

  return dict(__str__=__str__, __getattr__=__getattr__)
