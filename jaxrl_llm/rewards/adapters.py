"""The user's own reward functions, called as the trainers they were written for would call them.

Each public function here is a convention: `f(text, row, settings) -> (args, keywords)`, what the user's function is
given for one reply, or `f(texts, rows, settings)` for conventions of lists. Which one a function follows is read off
the names of its parameters, or told by config.rewards.style. Functions of lists are given lists of one; with
config.rewards.batched='group' all replies to a prompt at once, and with 'step' all that are graded together, so that a
reward may compare them: deadline_s, cpu_s and memory_mb are then those of a call, and what fails, fails for all its
replies. Nobody here knows token ids: they are None.

A function may have an attribute `check`, f(settings, where), which is called before anything compiles, and raises
UserError for settings that it cannot work with.
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


def trl(texts: Sequence[str], rows: Sequence[Row], settings: dict) -> Given:
  """f(prompts=, completions=, **columns), lists → list of float, or None to skip a reply; may be async.

  Completions are messages where the rows' prompts are, else text, and `trl_chat` makes them messages always. A column
  that some of the rows lack is None there. Source: none.
  """
  if any(row.messages for row in rows):
    return trl_chat(texts, rows, settings)
  return (), _batch([row.question for row in rows], list(texts), rows) | settings


def trl_chat(texts: Sequence[str], rows: Sequence[Row], settings: dict) -> Given:
  """As `trl`, with prompts and completions as messages whatever the rows have. Source: none."""
  replies = [_reply(text) for text in texts]
  return (), _batch([_messages(row) for row in rows], replies, rows) | settings


def openrlhf(texts: Sequence[str], rows: Sequence[Row], settings: dict) -> Given:
  """reward_func(queries, prompts, labels), lists → dict with `rewards`, or these. Source: none.

  A query is the prompt's text and the reply; the marks of the chat template are not in it.
  """
  prompts = [_text(row) for row in rows]
  queries = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
  return (queries, prompts, [truth(row) for row in rows]), settings


def verl_batch(texts: Sequence[str], rows: Sequence[Row], settings: dict) -> Given:
  """compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=), lists → list of float, or of dicts.

  As verl's manager of batches calls it. Source: none.
  """
  told = dict(data_sources=[row.source for row in rows], solution_strs=list(texts))
  told['ground_truths'] = [truth(row) for row in rows]
  told['extra_infos'] = [row.extra.get('extra_info', row.extra) for row in rows]
  return (), told | settings


def slime_group(texts: Sequence[str], rows: Sequence[Row], settings: dict) -> Given:
  """async group_rm(args, samples) → list of float; each as in `slime`. Only with config.rewards.batched. Source: none."""
  samples = [slime(text, row, {})[0][1] for text, row in zip(texts, rows, strict=True)]
  return (types.SimpleNamespace(**settings), samples), {}


def areal(text: str, row: Row, settings: dict) -> Given:
  """f(prompt, completions, prompt_ids, completion_ids, **row) → float; texts. Source: none."""
  told = {k: v for k, v in columns(row).items() if k not in ('prompt', 'completions')}
  return (_text(row), text, None, None), told | settings


def slime(text: str, row: Row, settings: dict) -> Given:
  """async custom_rm(args, sample) → float, or dict with `score`. Source: none.

  sample has prompt, response, label and metadata; args are the settings of config.rewards.
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


_LISTS = {fn.__name__: fn for fn in (trl, trl_chat, openrlhf, verl_batch, slime_group)}
STYLES = {fn.__name__: fn for fn in (verl, areal, slime, gym, verifiers)} | _LISTS
_BATCHED = ('', 'group', 'step')
# The names by which a function's convention is known, the most telling first.
_SIGNS = (
  ('gym', {'answer', 'entry'}),
  ('slime', {'args', 'sample'}),
  ('slime_group', {'args', 'samples'}),
  ('openrlhf', {'queries'}),
  ('areal', {'prompt', 'completions', 'prompt_ids', 'completion_ids'}),
  ('trl', {'completions'}),
  ('verl', {'solution_str'}),
  ('verl_batch', {'solution_strs'}),
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
  batched: str = ''  # 'group', 'step': to be called by `together`, with so many replies at once

  def __call__(self, text: str, row: Row) -> float | None:
    return self.together([text], [row])[0]

  def together(self, texts: Sequence[str], rows: Sequence[Row]) -> list[float | None]:
    """One call for several replies, where the convention is one of lists. Source: none."""
    args, keywords = self.given(texts, rows)
    result = self.fn(*args, **keywords)
    if inspect.isawaitable(result):
      result = asyncio.run(_awaited(result))
    return _numbers(result, self.style, len(texts))

  def given(self, texts: Sequence[str], rows: Sequence[Row]) -> Given:
    """What the function is called with. Source: none."""
    convention, listed = STYLES[self.style], self.style in _LISTS
    told = (texts, rows) if listed else (texts[0], rows[0])
    args, keywords = convention(*told, self.settings)
    return args, _taken(self.fn, keywords, rows, len(args), listed)

  def missing(self, row: Row) -> list[str]:
    """Columns that the function needs and the row has not. Source: none."""
    args, given = self.given([''], [row])
    return [
      p.name
      for p in _parameters(self.fn)[len(args) :]
      if p.default is p.empty
      and p.name not in given
      and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]


def own(fn: Callable, spec: dict[str, Any], where: str) -> Own:
  """The grader of a user's function with the settings `spec`, among them perhaps `style` and `batched`.

  `where` names it in messages. Raises UserError for a function of no known convention, for one that does not take what
  it would be given, and for one of single replies that is to be batched. Source: none.
  """
  spec = dict(spec)
  batched = spec.pop('batched', '')
  if batched not in _BATCHED:
    raise UserError(
      f"{where}: batched={batched!r} must be one of: 'group', 'step', or '' for single replies."
    )
  style = spec.pop('style', '') or _style(fn, where)
  if style not in STYLES:
    raise UserError(
      f'{where}: style={style!r} is unknown; choose one of: {", ".join(sorted(STYLES))}.'
    )
  if batched and style not in _LISTS:
    raise UserError(
      f'{where}: batched={batched!r} needs a function of lists, and this one is called as {style!r} calls; write it as '
      f'one of: {", ".join(sorted(_LISTS))}.'
    )
  if style == 'slime_group' and not batched:
    raise UserError(
      f"{where} takes the samples of a group at once, and graders see one reply; set batched='group' beside it, or "
      'give a function of one sample.'
    )
  made = Own(fn, style, spec, batched)
  _check(made, where)
  return made


def check_columns(graders: Iterable[tuple[str, Any]], rows: Sequence[Row]) -> None:
  """Raises UserError where a function of the user's needs a column that a row has not. Source: none."""
  alike = {}  # rows of the same columns need one look
  for row in rows:
    alike.setdefault((frozenset(columns(row)), bool(row.answer), bool(row.messages)), row)
  for name, grader in graders:
    for row in alike.values() if isinstance(grader, Own) else ():
      missing = grader.missing(row)
      if missing:
        raise UserError(
          f'config.rewards: {name!r} takes {missing[0]!r}, and row {row.id} of {row.source!r} has no such column, but: '
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
  found = next((style for style, signs in _SIGNS if signs <= names), None)
  if found:
    return found
  if any(p.kind == p.VAR_KEYWORD for p in _parameters(fn)):
    return 'verl'
  raise UserError(
    f'{where} has the parameters {", ".join(sorted(names)) or "none"}, which it does not take in any convention known '
    f'here; rename them as in verl (data_source, solution_str, ground_truth, extra_info), or set config.rewards.style to '
    f'one of: {", ".join(sorted(STYLES))}.'
  )


def _check(made: Own, where: str) -> None:
  """That the function takes what it will be given, as far as that does not hang on the row."""
  dummy = Row('', '', (), '', '', {})
  args, given = made.given([''], [dummy])
  parameters = _parameters(made.fn)
  keyed = any(p.kind == p.VAR_KEYWORD for p in parameters)
  told = ', '.join(f'{key}=' for key in made.settings)
  for name in made.settings:
    if (
      not keyed
      and made.style not in ('slime', 'slime_group')
      and name not in [p.name for p in parameters]
    ):
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
  try:
    bind = inspect.signature(made.fn)
    (bind.bind if made.style in _WHOLE else bind.bind_partial)(*args, **given)
  except TypeError as error:
    raise UserError(
      f'{where} is called as {made.style!r} calls ({len(args)} arguments; {", ".join(given) or "no names"}), which it '
      f'does not take: {error}; see config.rewards.style.'
    ) from error


_WHOLE = (
  'verl',
  'verl_batch',
  'openrlhf',
  'slime',
  'slime_group',
  'gym',
)  # conventions that take no column of the row


def _parameters(fn: Callable) -> list[inspect.Parameter]:
  return list(inspect.signature(fn).parameters.values())


def _taken(
  fn: Callable, keywords: dict[str, Any], rows: Sequence[Row], skip: int, listed: bool
) -> dict[str, Any]:
  """Those that the function takes; an answer under another name, where it asks for one that the rows lack."""
  parameters = _parameters(fn)[skip:]
  if any(p.kind == p.VAR_KEYWORD for p in parameters):
    first = {p.name for p in _parameters(fn)[:skip]}
    taken = {k: v for k, v in keywords.items() if k not in first}
  else:
    taken = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
  for p in parameters:
    if p.name in _ANSWERS and p.name not in taken and p.default is p.empty and rows[0].answer:
      taken[p.name] = [truth(row) for row in rows] if listed else truth(rows[0])
  return taken


def _batch(prompts: list, completions: list, rows: Sequence[Row]) -> dict[str, Any]:
  held = [columns(row) for row in rows]
  told = {
    name: [of.get(name) for of in held] for name in dict.fromkeys(k for of in held for k in of)
  }
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


def _numbers(result: Any, style: str, count: int) -> list[float | None]:
  """The rewards of `count` replies, None for those to skip, out of what a function returned."""
  result = _plain(result, ('rewards', 'score', 'reward'))
  found = list(result) if isinstance(result, list | tuple) else [result]
  if len(found) != count:
    told = 'one reply' if count == 1 else f'{count} replies'
    raise ValueError(f'the grader returned {len(found)} rewards for {told}')
  found = [_plain(one, ('score', 'reward')) for one in found]
  return [None if one is None and style in ('trl', 'trl_chat') else float(one) for one in found]


def _plain(result: Any, names: tuple[str, ...]) -> Any:
  """The first of `names` that a dict has; an array or a tensor as a list or a number."""
  if isinstance(result, dict):
    name = next((name for name in names if name in result), None)
    if name is None:
      raise ValueError(f'the grader returned a dict without any of {", ".join(names)}')
    result = result[name]
  return result.tolist() if hasattr(result, 'tolist') else result
