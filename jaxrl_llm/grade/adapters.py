"""The user's own reward functions, called as the trainers they were written for would call them.

Each public function here is a convention: `f(text, row, settings) -> (args, keywords)`, what the user's function is
given for one reply. Which one a function follows is read off the names of its parameters, or told by
config.grade.style. Functions of whole batches are given a batch of one: a reward that compares the replies of a group
cannot be had from them. Nobody here knows token ids: they are None.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxrl_llm.types import COLUMNS, Row, UserError

# What rows call the answer: one that a function asks for and the row lacks is given the row's answer.
_ANSWERS = ('answer', 'ground_truth', 'label', 'solution')
Given = tuple[tuple[Any, ...], dict[str, Any]]


def verl(text: str, row: Row, settings: dict) -> Given:
  """compute_score(data_source=, solution_str=, ground_truth=, extra_info=) → float, or dict with `score`.

  Source: none.
  """
  told = dict(data_source=row.source, solution_str=text, ground_truth=truth(row))
  told['extra_info'] = row.extra.get('extra_info', row.extra)
  return (), told | settings


def trl(text: str, row: Row, settings: dict) -> Given:
  """f(prompts=, completions=, **columns), lists of one → list of float, or None to skip it; may be async.

  Completions are messages where the row's prompt is, else text, and `trl_chat` makes them messages always.
  Source: none.
  """
  if row.messages:
    return trl_chat(text, row, settings)
  return (), _batch([row.question], [text], row) | settings


def trl_chat(text: str, row: Row, settings: dict) -> Given:
  """As `trl`, with prompts and completions as messages whatever the row has. Source: none."""
  return (), _batch([_messages(row)], [_reply(text)], row) | settings


def openrlhf(text: str, row: Row, settings: dict) -> Given:
  """reward_func(queries, prompts, labels), lists of one → dict with `rewards`, or these. Source: none.

  A query is the prompt's text and the reply; the marks of the chat template are not in it.
  """
  prompt = _text(row)
  return ([prompt + text], [prompt], [truth(row)]), settings


def areal(text: str, row: Row, settings: dict) -> Given:
  """f(prompt, completions, prompt_ids, completion_ids, **row) → float; texts. Source: none."""
  told = {k: v for k, v in columns(row).items() if k not in ('prompt', 'completions')}
  return (_text(row), text, None, None), told | settings


def slime(text: str, row: Row, settings: dict) -> Given:
  """async custom_rm(args, sample) → float, or dict with `score`. Source: none.

  sample has prompt, response, label and metadata; args are the settings of config.grade.
  """
  metadata = row.extra.get('metadata', {})
  told = dict(prompt=list(row.messages) or row.question, response=text, label=truth(row))
  return (types.SimpleNamespace(**settings), types.SimpleNamespace(**told, metadata=metadata)), {}


def gym(text: str, row: Row, settings: dict) -> Given:
  """score_answer(answer, entry) → float, with reasoning-gym's entry. Source: none."""
  answer = row.extra.get('gym', {}).get('answer', truth(row))
  entry = dict(question=_text(row), answer=answer, metadata=row.extra.get('metadata', {}))
  return (text, entry), settings


def verifiers(text: str, row: Row, settings: dict) -> Given:
  """f(prompt=, completion=, answer=, info=, task=, state=), as many as it takes → float; messages. Source: none."""
  told = dict(prompt=_messages(row), completion=_reply(text), answer=truth(row))
  told |= dict(info=row.extra.get('info', {}), task=row.extra.get('task', row.source))
  return (), columns(row) | told | dict(state=dict(told)) | settings


STYLES = {fn.__name__: fn for fn in (verl, trl, trl_chat, openrlhf, areal, slime, gym, verifiers)}
# The names by which a function's convention is known, the most telling first.
_SIGNS = (
  ('gym', {'answer', 'entry'}),
  ('slime', {'args', 'sample'}),
  ('openrlhf', {'queries'}),
  ('areal', {'prompt', 'completions', 'prompt_ids', 'completion_ids'}),
  ('trl', {'completions'}),
  ('verl', {'solution_str'}),
  ('verifiers', {'completion'}),
)
# What the trainer gives and a grader has not got.
_ABSENT = dict(
  trl=('completion_ids', 'trainer_state'),
  trl_chat=('completion_ids', 'trainer_state'),
  verifiers=('parser',),
)


@dataclasses.dataclass(frozen=True)
class Own:
  """A user's function as a grader: `own(text, row)` is a number, or None where the reply is to be skipped."""

  fn: Callable
  style: str
  settings: dict[str, Any]

  def __call__(self, text: str, row: Row) -> float | None:
    args, keywords = STYLES[self.style](text, row, self.settings)
    result = self.fn(*args, **_taken(self.fn, keywords, row, len(args)))
    if inspect.isawaitable(result):
      result = asyncio.run(_awaited(result))
    return _number(result, self.style)

  def missing(self, row: Row) -> list[str]:
    """Columns that the function needs and the row has not. Source: none."""
    args, keywords = STYLES[self.style]('', row, self.settings)
    given = _taken(self.fn, keywords, row, len(args))
    return [
      p.name
      for p in _parameters(self.fn)[len(args) :]
      if p.default is p.empty
      and p.name not in given
      and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]


def own(fn: Callable, spec: dict[str, Any], where: str) -> Own:
  """The grader of a user's function with the settings `spec`, among them perhaps `style`. `where` names it in messages.

  Raises UserError for a function of no known convention, and for one that does not take what it would be given.
  Source: none.
  """
  spec = dict(spec)
  style = spec.pop('style', '') or _style(fn, where)
  if style not in STYLES:
    raise UserError(
      f'{where}: style={style!r} is unknown; choose one of: {", ".join(sorted(STYLES))}.'
    )
  made = Own(fn, style, spec)
  _check(made, where)
  return made


def check_rows(graders: Iterable[tuple[str, Any]], rows: Sequence[Row]) -> None:
  """Raises UserError where a function of the user's needs a column that a row has not. Source: none."""
  alike = {}  # rows of the same columns need one look
  for row in rows:
    alike.setdefault((frozenset(columns(row)), bool(row.answer), bool(row.messages)), row)
  for name, grader in graders:
    for row in alike.values() if isinstance(grader, Own) else ():
      missing = grader.missing(row)
      if missing:
        raise UserError(
          f'config.grade: {name!r} takes {missing[0]!r}, and row {row.id} of {row.source!r} has no such column, but: '
          f'{", ".join(sorted(columns(row)))}; add it, or give the parameter a default.'
        )


def truth(row: Row) -> Any:
  """The answer as the file has it: the value whose text is the row's answer. Source: none."""
  models = [row.extra.get(name) for name in ('reward_model', 'reward_spec')]
  held = [told.get('ground_truth') for told in models if isinstance(told, dict)]
  held += row.extra.get(COLUMNS, {}).values()
  told = lambda value: not isinstance(value, str) and json.dumps(value, default=str) == row.answer  # noqa: E731
  return next(filter(told, held), row.answer)


def columns(row: Row) -> dict[str, Any]:
  """All that the file says of a row but its prompt, by its own names; and the answer as `answer`. Source: none."""
  told = {k: v for k, v in row.extra.items() if k != COLUMNS}
  return dict(answer=row.answer, data_source=row.source) | told | row.extra.get(COLUMNS, {})


def _style(fn: Callable, where: str) -> str:
  names = {p.name for p in _parameters(fn)}
  if 'samples' in names and 'args' in names:
    raise UserError(
      f'{where} takes the samples of a group at once, and graders see one reply; give a function of one sample.'
    )
  found = next((style for style, signs in _SIGNS if signs <= names), None)
  if found:
    return found
  if any(p.kind == p.VAR_KEYWORD for p in _parameters(fn)):
    return 'verl'
  raise UserError(
    f'{where} has the parameters {", ".join(sorted(names)) or "none"}, which it does not take in any convention known '
    f'here; rename them as in verl (data_source, solution_str, ground_truth, extra_info), or set config.grade.style to '
    f'one of: {", ".join(sorted(STYLES))}.'
  )


def _check(made: Own, where: str) -> None:
  """That the function takes what it will be given, as far as that does not hang on the row."""
  dummy = Row('', '', (), '', '', {})
  args, keywords = STYLES[made.style]('', dummy, made.settings)
  parameters = _parameters(made.fn)
  keyed = any(p.kind == p.VAR_KEYWORD for p in parameters)
  told = ', '.join(f'{key}=' for key in made.settings)
  for name in made.settings:
    if not keyed and made.style != 'slime' and name not in [p.name for p in parameters]:
      raise UserError(
        f'{where} is called with ({told}), which it does not take: it has no parameter {name!r}.'
      )
  absent = [
    p.name for p in parameters if p.default is p.empty and p.name in _ABSENT.get(made.style, ())
  ]
  if absent:
    raise UserError(
      f'{where} asks for {absent[0]!r}, which graders are not told; give that parameter a default that does without.'
    )
  given = _taken(made.fn, keywords, dummy, len(args))
  try:
    bind = inspect.signature(made.fn)
    (bind.bind if made.style in _WHOLE else bind.bind_partial)(*args, **given)
  except TypeError as error:
    raise UserError(
      f'{where} is called as {made.style!r} calls ({len(args)} arguments; {", ".join(given) or "no names"}), which it '
      f'does not take: {error}; see config.grade.style.'
    ) from error


_WHOLE = ('verl', 'openrlhf', 'slime', 'gym')  # conventions that take no column of the row


def _parameters(fn: Callable) -> list[inspect.Parameter]:
  return list(inspect.signature(fn).parameters.values())


def _taken(fn: Callable, keywords: dict[str, Any], row: Row, skip: int) -> dict[str, Any]:
  """Those that the function takes; an answer under another name, where it asks for one that the row lacks."""
  parameters = _parameters(fn)[skip:]
  if any(p.kind == p.VAR_KEYWORD for p in parameters):
    first = {p.name for p in _parameters(fn)[:skip]}
    taken = {k: v for k, v in keywords.items() if k not in first}
  else:
    taken = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
  listed = isinstance(keywords.get('completions'), list)
  for p in parameters:
    if p.name in _ANSWERS and p.name not in taken and p.default is p.empty and row.answer:
      taken[p.name] = [truth(row)] if listed else truth(row)
  return taken


def _batch(prompts: list, completions: list, row: Row) -> dict[str, Any]:
  told = {k: [v] for k, v in columns(row).items()}
  nothing = lambda *_, **__: None  # noqa: E731
  return told | dict(
    prompts=prompts, completions=completions, log_extra=nothing, log_metric=nothing
  )


def _messages(row: Row) -> list[dict[str, str]]:
  return [dict(m) for m in row.messages] or [dict(role='user', content=row.question)]


def _reply(text: str) -> list[dict[str, str]]:
  return [dict(role='assistant', content=text)]


def _text(row: Row) -> str:
  return row.question or '\n'.join(message['content'] for message in row.messages)


async def _awaited(result: Any) -> Any:
  return await result


def _number(result: Any, style: str) -> float | None:
  if isinstance(result, dict):
    names = ('rewards', 'score', 'reward')
    name = next((name for name in names if name in result), None)
    if name is None:
      raise ValueError(f'the grader returned a dict without any of {", ".join(names)}')
    result = result[name]
  if hasattr(result, 'tolist'):  # an array or a tensor
    result = result.tolist()
  if isinstance(result, list | tuple):
    if len(result) != 1:
      raise ValueError(f'the grader returned {len(result)} rewards for one reply')
    result = result[0]
    if result is None and style in ('trl', 'trl_chat'):
      return None
  return float(result)
