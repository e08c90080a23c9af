"""From rows to padded prompts: choose the source, render, encode, drop what is too long."""

from __future__ import annotations

import dataclasses
import hashlib
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from absl import logging

from jaxrl_llm.config.stages import choices
from jaxrl_llm.data import sources
from jaxrl_llm.types import Prompts, Row, UserError


class Tables(NamedTuple):
  """The two sets of a run; no question is in both."""

  train: PromptTable
  held_out: PromptTable  # may have no rows


@dataclasses.dataclass(frozen=True)
class PromptTable:
  """Encoded rows, reached by number. `index_P` of its prompts are these numbers."""

  rows: tuple[Row, ...]  # those that fit
  tokens: tuple[np.ndarray, ...]  # int32 token ids of each row's prompt
  prompt_tokens: int  # L
  dropped: int  # rows that did not fit
  fingerprint: str  # sha256 of rows, tokens and settings: equal where a run may resume

  def __len__(self) -> int:
    return len(self.rows)

  def prompts(self, indices: Sequence[int], born: int = 0) -> Prompts:
    """The prompts of these rows, right-padded with 0 to [P, L], proposed in step `born`. Raises IndexError."""
    index_P = np.asarray(indices, np.int32).reshape(-1)
    if len(index_P) and not 0 <= index_P.min() <= index_P.max() < len(self):
      raise IndexError(f'row indices must be from 0 to {len(self) - 1}: {index_P.tolist()}')
    tokens_PxL, length_P = padded([self.tokens[i] for i in index_P], self.prompt_tokens)
    born_P = np.full(len(index_P), born, np.int32)
    return Prompts(tokens_PxL, length_P, index_P, born_P, np.zeros(len(index_P), np.float32))


def load(config: Any, tokenizer: Any) -> Tables:
  """config.data → the training and held-out tables, the latter of at most config.evaluation.prompts rows.

  Raises UserError for an unknown source, whatever the source finds wrong, a bad template, or
  prompts that are all longer than config.prompt_tokens. Source: none.
  """
  data, valid = config.data, choices(sources)
  if data.source not in valid:
    raise UserError(
      f'config.data.source={data.source!r} is unknown; choose one of: {", ".join(sorted(valid))}.'
    )
  _check_template(data.template)
  train, held_out = valid[data.source](data, config.evaluation.prompts)
  return Tables(
    make_table(train, data, config.prompt_tokens, tokenizer),
    make_table(held_out, data, config.prompt_tokens, tokenizer),
  )


def make_table(rows: Sequence[Row], data: Any, prompt_tokens: int, tokenizer: Any) -> PromptTable:
  """Renders and encodes rows and keeps those of 1 to prompt_tokens tokens; none is ever cut.

  Raises UserError where rows were given and none fits. Source: none.
  """
  examples = encoded(rows, data, tokenizer)
  tokens = [examples[i] for i in range(len(examples))]
  if any(len(t) == 0 for t in tokens):
    raise UserError('a prompt of data has no token at all; see config.data.template and the rows.')
  kept = [i for i, t in enumerate(tokens) if len(t) <= prompt_tokens]
  if rows and not kept:
    shortest, longest = min(map(len, tokens)), max(map(len, tokens))
    raise UserError(
      f'every prompt is longer than config.prompt_tokens={prompt_tokens}; raise that: the shortest '
      f'has {shortest} tokens, the longest {longest}.'
    )
  if len(kept) < len(rows):
    logging.warning(
      '%d of %d rows were dropped: their prompts are longer than config.prompt_tokens=%d '
      '(the longest has %d tokens).',
      len(rows) - len(kept), len(rows), prompt_tokens, max(map(len, tokens)),
    )  # fmt: skip
  chosen, prompts = tuple(rows[i] for i in kept), tuple(tokens[i] for i in kept)
  mark = _fingerprint(chosen, prompts, prompt_tokens)
  return PromptTable(chosen, prompts, prompt_tokens, len(rows) - len(kept), mark)


def encoded(rows: Sequence[Row], data: Any, tokenizer: Any) -> grain.MapDataset:
  """A random-access data set of int32 token ids, one entry a row, made when it is read.

  Source: none.
  """
  # Numbers go in, not rows: grain flattens what it reads, and extra may hold what no pytree can.
  dataset = grain.MapDataset.range(len(rows)).map(lambda index: render(rows[index], data))
  return dataset.map(lambda rendered: _encode(rendered, tokenizer))


def encode(row: Row, data: Any, tokenizer: Any) -> np.ndarray:
  """One row's prompt, int32 tokens. Source: none."""
  return _encode(render(row, data), tokenizer)


def with_question(row: Row, template: str, parts: dict[str, str]) -> Row:
  """The row with its question, or its last message of a user, laid into a template of {question} and `parts`.

  Source: none.
  """
  if not row.messages:
    return row._replace(question=template.format(question=row.question, **parts))
  messages = [dict(message) for message in row.messages]
  last = max((i for i, m in enumerate(messages) if m['role'] == 'user'), default=len(messages) - 1)
  messages[last]['content'] = template.format(question=messages[last]['content'], **parts)
  return row._replace(messages=tuple(messages))


def render(row: Row, data: Any) -> str | list[dict[str, str]]:
  """Row → what the tokenizer gets: messages where data.chat is set, otherwise text. Source: none.

  data.system comes first, unless the row brings a system message of its own.
  """
  if row.messages:
    _check_messages(data)
    row = with_question(row, data.template, {})
    own = any(message['role'] == 'system' for message in row.messages)
    system = [dict(role='system', content=data.system)] if data.system and not own else []
    return system + [dict(message) for message in row.messages]
  text = data.template.format(question=row.question)
  if not data.chat:
    return f'{data.system}\n{text}' if data.system else text
  system = [dict(role='system', content=data.system)] if data.system else []
  return [*system, dict(role='user', content=text)]


def prompt_text(row: Row, data: Any) -> str:
  """All that a prompt says, without the marks of a chat. Source: none."""
  rendered = render(row, data)
  text = isinstance(rendered, str)
  return rendered if text else '\n'.join(message['content'] for message in rendered)


def _encode(rendered: str | list[dict[str, str]], tokenizer: Any) -> np.ndarray:
  text = isinstance(rendered, str)
  ids = tokenizer.encode(rendered) if text else tokenizer.encode_chat(rendered)
  return np.asarray(ids, np.int32).reshape(-1)


def padded(sequences: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
  """(tokens [N, width] int32, right-padded with 0, lengths [N]). Source: none."""
  tokens = np.zeros((len(sequences), width), np.int32)
  for row, sequence in zip(tokens, sequences, strict=True):
    row[: len(sequence)] = sequence
  return tokens, np.array([len(s) for s in sequences], np.int32)


def _check_template(template: str) -> None:
  where = f'config.data.template={template!r}'
  try:
    fields = [f for _, *f in string.Formatter().parse(template) if f[0] is not None]
  except ValueError as error:
    raise UserError(f'{where} is no template ({error}); write {{{{ and }}}} for braces.') from error
  for field in fields:
    if field != ['question', '', None]:
      raise UserError(
        f'{where} has the unknown placeholder {{{field[0]}}}; only {{question}} exists.'
      )
  if not fields:
    raise UserError(f'{where} has no {{question}}, so that all prompts would be the same; add it.')


def _check_messages(data: Any) -> None:
  if not data.chat:
    raise UserError(
      'config.data.chat=False cannot render prompts that are messages; set config.data.chat=True.'
    )


def _fingerprint(rows: Sequence[Row], tokens: Sequence[np.ndarray], prompt_tokens: int) -> str:
  # The tokens hold what system, template, chat and tokenizer made of a row.
  digest = hashlib.sha256(str(prompt_tokens).encode())
  for row, ids in zip(rows, tokens, strict=True):
    digest.update(repr(_canonical(row)).encode())
    digest.update(ids.tobytes())
  return digest.hexdigest()


def _canonical(value: Any) -> Any:
  """The same value for equal content in every process: no addresses, no order of sets."""
  if isinstance(value, dict):
    return 'dict', sorted((repr(k), _canonical(v)) for k, v in value.items())
  if isinstance(value, list | tuple):
    return [_canonical(v) for v in value]
  if isinstance(value, set | frozenset):
    return 'set', sorted(repr(_canonical(v)) for v in value)
  if isinstance(value, np.generic | np.ndarray):
    return value.tolist()
  plain = value is None or isinstance(value, str | bytes | int | float | complex)
  return value if plain else type(value).__name__


def kinds(rows: Sequence[Row]) -> np.ndarray:
  """int32 [N]: which rows are alike, for sharing evidence of difficulty. Source: none.

  Alike are rows of one source that agree in every small whole-number trait (number of terms,
  length, level): those that a generator or the file tells in `extra`, with at most 32 values in
  the source.
  """
  keys = levels(rows)
  codes = {key: i for i, key in enumerate(sorted(set(keys)))}
  return np.array([codes[key] for key in keys], np.int32)


def levels(rows: Sequence[Row]) -> list[tuple[str, ...]]:
  """Of each row its source, then 'trait=value' of what `kinds` goes by. Source: none."""
  traits = [(row.source, _traits(row)) for row in rows]
  values: dict[tuple[str, str], set[int]] = {}
  for source, told in traits:
    for name, value in told.items():
      values.setdefault((source, name), set()).add(value)
  return [
    (
      source,
      *(f'{n}={v}' for n, v in sorted(told.items()) if len(values[source, n]) <= _MAX_LEVELS),
    )
    for source, told in traits
  ]


_MAX_LEVELS = 32
_OWN = ('index', 'source_index')  # a row's number is no trait, however few rows there are


def _traits(row: Row) -> dict[str, int]:
  more = row.extra.get('metadata')
  told = {**row.extra, **(more if isinstance(more, dict) else {})}
  return {k: v for k, v in told.items() if type(v) is int and k not in _OWN}
