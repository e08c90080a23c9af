"""The user's own reward functions, called with the signatures of other trainers.

Each public function of the first half is a convention: `f(text, row, settings) -> (args, keywords)` builds the
arguments of the user's function for one completion. A convention of lists is `f(texts, rows, settings)`. The convention
of a function follows from its parameter names, or from config.rewards.style.

Functions of lists get lists of one by default. With config.rewards.batched='group' they get all completions of a prompt
at once, with 'step' all completions that are graded together, so that a reward may compare them. deadline_s, cpu_s and
memory_mb then apply to the call, and a failed call fails all its completions. Token ids are not available: they are
None.

A function may have an attribute `check`, f(settings, where). It runs before anything compiles and raises UserError for
settings that the function cannot use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import types
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

from jaxrl_llm.types import COLUMNS, JsonObject, Row, UserError

# Arguments, columns and settings by name. The user's function defines their types.
Keywords: TypeAlias = JsonObject
# Names of the ground truth. A parameter of such a name gets the row's answer where the row has no such column.
_ANSWERS = ('answer', 'ground_truth', 'label', 'solution')
CallArguments: TypeAlias = tuple[tuple, Keywords]


def verl(text: str, row: Row, settings: Keywords) -> CallArguments:
  """compute_score(data_source=, solution_str=, ground_truth=, extra_info=) → float, or dict with `score`."""
  keywords = dict(data_source=row.source, solution_str=text, ground_truth=ground_truth(row))
  keywords['extra_info'] = row.extra.get('extra_info', row.extra)
  return (), keywords | settings


def trl(texts: Sequence[str], rows: Sequence[Row], settings: Keywords) -> CallArguments:
  """f(prompts=, completions=, **columns), lists → list of float, or None to skip a completion; may be async.

  Completions are messages where the rows' prompts are messages, else text. A column that some of the rows lack is None
  for these.
  """
  if any(row.messages for row in rows):
    return trl_chat(texts, rows, settings)
  return (), _trl_keywords([row.question for row in rows], list(texts), rows) | settings


def trl_chat(texts: Sequence[str], rows: Sequence[Row], settings: Keywords) -> CallArguments:
  """As `trl`, with prompts and completions as messages, also where the rows' prompts are texts."""
  prompts, completions = [_messages(row) for row in rows], [_assistant(text) for text in texts]
  return (), _trl_keywords(prompts, completions, rows) | settings


def openrlhf(texts: Sequence[str], rows: Sequence[Row], settings: Keywords) -> CallArguments:
  """reward_func(queries, prompts, labels), lists → list of float, or dict with `rewards`.

  A query is the text of prompt and completion, without the tokens of the chat template.
  """
  prompts = [_prompt_text(row) for row in rows]
  queries = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
  return (queries, prompts, [ground_truth(row) for row in rows]), settings


def verl_batch(texts: Sequence[str], rows: Sequence[Row], settings: Keywords) -> CallArguments:
  """compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=), lists → list of float, or of dicts.

  This is the signature of verl's batch reward manager.
  """
  keywords = dict(data_sources=[row.source for row in rows], solution_strs=list(texts))
  keywords['ground_truths'] = [ground_truth(row) for row in rows]
  keywords['extra_infos'] = [row.extra.get('extra_info', row.extra) for row in rows]
  return (), keywords | settings


def slime_group(texts: Sequence[str], rows: Sequence[Row], settings: Keywords) -> CallArguments:
  """async group_rm(args, samples) → list of float; samples as in `slime`. Requires config.rewards.batched."""
  samples = [slime(text, row, {})[0][1] for text, row in zip(texts, rows, strict=True)]
  return (types.SimpleNamespace(**settings), samples), {}


def areal(text: str, row: Row, settings: Keywords) -> CallArguments:
  """f(prompt, completions, prompt_ids, completion_ids, **row) → float; prompt and completions are texts."""
  reserved = ('prompt', 'completions')
  keywords = {name: value for name, value in columns(row).items() if name not in reserved}
  return (_prompt_text(row), text, None, None), keywords | settings


def slime(text: str, row: Row, settings: Keywords) -> CallArguments:
  """async custom_rm(args, sample) → float, or dict with `score`.

  sample has prompt, response, label and metadata; args are the settings of config.rewards.
  """
  sample = types.SimpleNamespace(
    prompt=list(row.messages) or row.question,
    response=text,
    label=ground_truth(row),
    metadata=row.extra.get('metadata', {}),
  )
  return (types.SimpleNamespace(**settings), sample), {}


def gym(text: str, row: Row, settings: Keywords) -> CallArguments:
  """score_answer(answer, entry) → float, with reasoning-gym's entry."""
  answer = row.extra.get('gym', {}).get('answer', ground_truth(row))
  metadata = row.extra.get('metadata', {})
  return (text, dict(question=_prompt_text(row), answer=answer, metadata=metadata)), settings


def verifiers(text: str, row: Row, settings: Keywords) -> CallArguments:
  """f(prompt=, completion=, answer=, info=, task=, state=), any subset → float; prompt and completion are messages."""
  fields = dict(prompt=_messages(row), completion=_assistant(text), answer=ground_truth(row))
  fields |= dict(info=row.extra.get('info', {}), task=row.extra.get('task', row.source))
  return (), columns(row) | fields | dict(state=dict(fields)) | settings


_LISTS = {fn.__name__: fn for fn in (trl, trl_chat, openrlhf, verl_batch, slime_group)}
_SINGLES = {fn.__name__: fn for fn in (verl, areal, slime, gym, verifiers)}
STYLES = _SINGLES | _LISTS
_BATCHED = ('', 'group', 'step')
# Parameter names that identify a convention, the most specific first.
_SIGNATURES = (
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
# Arguments that the other trainer provides and this one cannot.
_UNAVAILABLE = dict(
  trl=('completion_ids', 'trainer_state'),
  trl_chat=('completion_ids', 'trainer_state'),
  verifiers=('parser',),
)
# Conventions whose arguments do not include columns of the row.
_COMPLETE = ('verl', 'verl_batch', 'openrlhf', 'slime', 'slime_group', 'gym')


@dataclasses.dataclass(frozen=True)
class UserGrader:
  """A user's function as a grader: `grader(text, row)` returns a number, or None to skip the completion."""

  fn: Callable
  style: str
  settings: Keywords
  # 'group', 'step': the pool calls `score_batch` with that many completions at once; '': with one
  batched: str = ''

  def __call__(self, text: str, row: Row) -> float | None:
    return self.score_batch([text], [row])[0]

  def score_batch(self, texts: Sequence[str], rows: Sequence[Row]) -> list[float | None]:
    """Rewards of several completions from one call; only for conventions of lists where there are several."""
    args, keywords = self.call_arguments(texts, rows)
    result = self.fn(*args, **keywords)
    if inspect.isawaitable(result):
      result = asyncio.run(_awaited(result))
    return _rewards(result, self.style, len(texts))

  def call_arguments(self, texts: Sequence[str], rows: Sequence[Row]) -> CallArguments:
    """The arguments of the user's function, restricted to its parameters."""
    of_lists = self.style in _LISTS
    if of_lists:
      args, keywords = _LISTS[self.style](texts, rows, self.settings)
    else:
      args, keywords = _SINGLES[self.style](texts[0], rows[0], self.settings)
    return args, _accepted(self.fn, keywords, rows, len(args), of_lists)

  def missing_columns(self, row: Row) -> list[str]:
    """Required parameters of the function that are no column of the row."""
    args, keywords = self.call_arguments([''], [row])
    return [
      p.name
      for p in _parameters(self.fn)[len(args) :]
      if p.default is p.empty
      and p.name not in keywords
      and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]


def user_grader(fn: Callable, spec: Keywords, where: str) -> UserGrader:
  """Make a grader of a user's function; `spec` holds its settings, and may hold `style` and `batched`.

  `where` names the function in messages. Raises UserError for a function of no known convention, for parameters that do
  not match the convention, and for a function of single completions that is to be batched.
  """
  settings = dict(spec)
  batched = settings.pop('batched', '')
  if batched not in _BATCHED:
    raise UserError(
      f"{where}: batched={batched!r} must be one of: 'group', 'step', or '' for single completions."
    )
  style = settings.pop('style', '') or _style_of(fn, where)
  if style not in STYLES:
    raise UserError(
      f'{where}: style={style!r} is unknown; choose one of: {", ".join(sorted(STYLES))}.'
    )
  if batched and style not in _LISTS:
    raise UserError(
      f'{where}: batched={batched!r} needs a function of lists, and the convention {style!r} has single completions; '
      f'write it in one of: {", ".join(sorted(_LISTS))}.'
    )
  if style == 'slime_group' and not batched:
    raise UserError(
      f"{where} takes the samples of a group at once, and graders get one completion; set batched='group' "
      f'beside it, or '
      'name a function of one sample.'
    )
  grader = UserGrader(fn, style, settings, batched)
  _check_signature(grader, where)
  return grader


def check_columns(graders: Iterable[tuple[str, Callable | None]], rows: Sequence[Row]) -> None:
  """Raise UserError where a user's function requires a column that a row lacks."""
  distinct = {}  # one row of each set of columns is enough
  for row in rows:
    distinct.setdefault((frozenset(columns(row)), bool(row.answer), bool(row.messages)), row)
  for name, grader in graders:
    if not isinstance(grader, UserGrader):
      continue
    for row in distinct.values():
      missing = grader.missing_columns(row)
      if missing:
        raise UserError(
          f'config.rewards: {name!r} requires {missing[0]!r}, and row {row.id} of {row.source!r} has only the columns: '
          f'{", ".join(sorted(columns(row)))}; add the column, or give the parameter a default.'
        )


def ground_truth(row: Row) -> Any:
  """The row's answer as the value in the file, such as a list, where its text equals the answer."""
  models = [row.extra.get(name) for name in ('reward_model', 'reward_spec')]
  candidates = [model.get('ground_truth') for model in models if isinstance(model, dict)]
  candidates += row.extra.get(COLUMNS, {}).values()
  for value in candidates:
    if not isinstance(value, str) and json.dumps(value, default=str) == row.answer:
      return value
  return row.answer


def columns(row: Row) -> Keywords:
  """All columns of the row but its prompt, by their names in the file; the answer is `answer`, too."""
  extra = {name: value for name, value in row.extra.items() if name != COLUMNS}
  return dict(answer=row.answer, data_source=row.source) | extra | row.extra.get(COLUMNS, {})


def _style_of(fn: Callable, where: str) -> str:
  names = {p.name for p in _parameters(fn)}
  for style, signature in _SIGNATURES:
    if signature <= names:
      return style
  if any(p.kind == p.VAR_KEYWORD for p in _parameters(fn)):
    return 'verl'
  raise UserError(
    f'{where} has the parameters {", ".join(sorted(names)) or "none"}, which match no known convention; rename them as '
    f'in verl (data_source, solution_str, ground_truth, extra_info), or set config.rewards.style to one of: '
    f'{", ".join(sorted(STYLES))}.'
  )


def _check_signature(grader: UserGrader, where: str) -> None:
  """Raise UserError where the function cannot take its arguments, as far as they do not depend on the row."""
  dummy = Row('', '', (), '', '', {})
  args, keywords = grader.call_arguments([''], [dummy])
  parameters = _parameters(grader.fn)
  names = {p.name for p in parameters}
  open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters)
  in_namespace = grader.style in ('slime', 'slime_group')  # settings are attributes of `args`
  for name in () if open_ended or in_namespace else grader.settings:
    if name not in names:
      raise UserError(
        f'{where} has no parameter {name!r} for the setting {name}=; remove the setting, or add the parameter.'
      )
  unavailable = _UNAVAILABLE.get(grader.style, ())
  required = [p.name for p in parameters if p.default is p.empty and p.name in unavailable]
  if required:
    raise UserError(
      f'{where} requires {required[0]!r}, which graders do not get; give that parameter a default.'
    )
  signature = inspect.signature(grader.fn)
  bind = signature.bind if grader.style in _COMPLETE else signature.bind_partial
  try:
    bind(*args, **keywords)
  except TypeError as error:
    raise UserError(
      f'{where} cannot take the arguments of the convention {grader.style!r} ({len(args)} positional; '
      f'{", ".join(keywords) or "none by name"}): {error}; see config.rewards.style.'
    ) from error


def _parameters(fn: Callable) -> list[inspect.Parameter]:
  return list(inspect.signature(fn).parameters.values())


def _accepted(
  fn: Callable, keywords: Keywords, rows: Sequence[Row], positional: int, of_lists: bool
) -> Keywords:
  """The keywords that the function accepts, and the ground truth for a required answer that the rows lack."""
  parameters = _parameters(fn)[positional:]
  if any(p.kind == p.VAR_KEYWORD for p in parameters):
    taken = {p.name for p in _parameters(fn)[:positional]}
    accepted = {name: value for name, value in keywords.items() if name not in taken}
  else:
    accepted = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
  for p in parameters:
    if p.name in _ANSWERS and p.name not in accepted and p.default is p.empty and rows[0].answer:
      truths = [ground_truth(row) for row in rows]
      accepted[p.name] = truths if of_lists else truths[0]
  return accepted


def _ignore(*_: object, **__: object) -> None:
  """Accepts and drops the metrics that a TRL-style function logs."""


def _trl_keywords(prompts: list, completions: list, rows: Sequence[Row]) -> Keywords:
  by_row = [columns(row) for row in rows]
  names = dict.fromkeys(name for row_columns in by_row for name in row_columns)
  lists = {name: [row_columns.get(name) for row_columns in by_row] for name in names}
  return lists | dict(
    prompts=prompts, completions=completions, log_extra=_ignore, log_metric=_ignore
  )


def _messages(row: Row) -> list[dict[str, str]]:
  return [dict(m) for m in row.messages] or [dict(role='user', content=row.question)]


def _assistant(text: str) -> list[dict[str, str]]:
  return [dict(role='assistant', content=text)]


def _prompt_text(row: Row) -> str:
  return row.question or '\n'.join(message['content'] for message in row.messages)


async def _awaited(result: Awaitable[Any]) -> Any:
  return await result


def _rewards(result: Any, style: str, count: int) -> list[float | None]:
  """The rewards of `count` completions from a function's result, None for those to skip."""
  result = _unwrapped(result, ('rewards', 'score', 'reward'))
  rewards = list(result) if isinstance(result, list | tuple) else [result]
  if len(rewards) != count:
    noun = 'completion' if count == 1 else 'completions'
    raise ValueError(f'the grader returned {len(rewards)} rewards for {count} {noun}')
  rewards = [_unwrapped(reward, ('score', 'reward')) for reward in rewards]
  may_skip = style in ('trl', 'trl_chat')
  return [None if reward is None and may_skip else float(reward) for reward in rewards]


def _unwrapped(result: Any, names: tuple[str, ...]) -> Any:
  """A dict's value under the first of `names` that it has; an array or tensor as a list or number."""
  if isinstance(result, dict):
    name = next((name for name in names if name in result), None)
    if name is None:
      raise ValueError(f'the grader returned a dict without any of {", ".join(names)}')
    result = result[name]
  return result.tolist() if hasattr(result, 'tolist') else result
