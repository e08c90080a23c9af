"""Converts rows to padded prompts: selects the source, renders, encodes, and drops prompts that are too long."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import string
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import grain
import numpy as np
from absl import logging

from jaxrl_llm.config import stages
from jaxrl_llm.data import benchmarks, files, row_filters, sources
from jaxrl_llm.types import JsonValue, Prompts, Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import Config, DataConfig


# Functions of sources.py that read rows instead of generating them.
_FILE_SOURCES = ('jsonl', 'files')


class Tokenizer(Protocol):
  """The methods of a tokenizer that this package uses; models.tokenizer.Tokenizer has them."""

  @property
  def end_ids(self) -> Collection[int]: ...

  def encode(self, text: str) -> Sequence[int]: ...

  def encode_chat(self, messages: list[dict[str, str]]) -> Sequence[int]: ...


class Tables(NamedTuple):
  """The training and the held-out set, without a common question."""

  train: PromptTable
  held_out: PromptTable  # may have no rows
  demonstrations: PromptTable  # of the supervised start


@dataclasses.dataclass(frozen=True)
class PromptTable:
  """Encoded rows by number; `index_P` of Prompts holds these numbers."""

  rows: tuple[Row, ...]  # whose prompts fit
  tokens: tuple[np.ndarray, ...]  # int32 token ids of each row's prompt
  prompt_tokens: int  # L
  dropped: int  # rows whose prompts are too long
  fingerprint: str  # sha256 of rows, tokens and settings; a run resumes only with an equal one
  from_files: bool = False  # else of a generator
  verifier: str = ''  # reward function of the rows of a benchmark; '' = config.rewards

  def __len__(self) -> int:
    return len(self.rows)

  @property
  def file_tokens_N(self) -> np.ndarray | None:
    """The prompt tokens of each row of a file, from which `kinds` forms traits; None for rows of a generator."""
    return np.array([len(t) for t in self.tokens], np.int32) if self.from_files else None

  @functools.cached_property
  def sources(self) -> list[str]:
    """The sources of the rows, those with the most rows first."""
    return [s for s, _ in collections.Counter(sorted(r.source for r in self.rows)).most_common()]

  def rows_of(self, prompts: Prompts) -> list[Row]:
    """Returns the row of each prompt of a step."""
    return [self.rows[i] for i in prompts.index_P]

  def prompts(
    self, indices: Sequence[int] | np.ndarray, born: int = 0, width: int | None = None
  ) -> Prompts:
    """Returns the prompts of these rows, right-padded with 0 to [P, L], proposed in step `born`. Raises IndexError.

    `width`: columns, at least the longest prompt's tokens; L of the table where it is None.
    """
    index_P = np.asarray(indices, np.int32).reshape(-1)
    if len(index_P) and not 0 <= index_P.min() <= index_P.max() < len(self):
      raise IndexError(f'row indices must be from 0 to {len(self) - 1}: {index_P.tolist()}')
    tokens_PxL, length_P = pad_rows([self.tokens[i] for i in index_P], width or self.prompt_tokens)
    born_P = np.full(len(index_P), born, np.int32)
    return Prompts(tokens_PxL, length_P, index_P, born_P, np.zeros(len(index_P), np.float32))


class RowSets(NamedTuple):
  """The rows of a source, without a common question."""

  train: Sequence[Row]
  held_out: Sequence[Row]  # may have no rows
  # of the supervised start; the same list as `train` where none is filtered
  demonstrations: Sequence[Row]
  verifier: str = ''  # reward function of the rows of a benchmark; '' = config.rewards


def load(config: Config, tokenizer: Tokenizer, rows: RowSets | None = None) -> Tables:
  """Returns the training table of config.data, and the held-out table of at most config.evaluation.prompts rows.

  `rows` are those of `load_rows`. Raises UserError as `load_rows` does, and where all prompts, or one of a
  benchmark, are longer than config.prompt_tokens.
  """
  train, held_out, demonstrations, verifier = rows or load_rows(config)
  table = lambda part: make_table(part, config.data, config.prompt_tokens, tokenizer)  # noqa: E731
  train_table, held_out_table = table(train), table(held_out)
  if verifier and held_out_table.dropped:
    longest = max(map(len, encoded(held_out, config.data, tokenizer)))
    raise UserError(
      f'{held_out_table.dropped} of the {len(held_out)} prompts of {benchmarks.FIELD}='
      f'{config.evaluation.benchmark!r} are longer than config.prompt_tokens={config.prompt_tokens}, and an accuracy '
      f'without them would not compare with others; raise it to {longest}.'
    )
  learned = train_table if demonstrations is train else table(demonstrations)
  return Tables(train_table, dataclasses.replace(held_out_table, verifier=verifier), learned)


def load_rows(config: Config) -> RowSets:
  """Reads the rows of config.data, and of config.evaluation.benchmark; no tokenizer is needed.

  Training rows are those of config.data.keep, and demonstrations those of config.sft.keep. Raises UserError for an
  unknown source, errors of the source and of both filters, and an invalid template.
  """
  data, valid = config.data, stages.choices(sources)
  if data.source not in valid:
    raise UserError(
      f'config.data.source={data.source!r} is unknown; choose one of: {", ".join(sorted(valid))}; jsonl '
      'reads Parquet, too.'
    )
  if data.path and data.source != 'jsonl':
    raise UserError(
      f'config.data.path={data.path!r} is not read by config.data.source={data.source!r}; set '
      "--config.data.source=jsonl, or --config.data.path=''."
    )
  _check_template(data.template)
  evaluation, read = config.evaluation, valid[data.source]
  if not evaluation.benchmark:
    return _filtered(config, *read(data, evaluation.prompts))
  benchmark = benchmarks.read(evaluation.benchmark, evaluation.prompts, data.seed)
  where = f'{benchmarks.FIELD}={evaluation.benchmark!r}'
  train = files.without_questions(read(data, 0)[0], benchmark.rows, 'config.data', where)
  return _filtered(config, train, benchmark.rows)._replace(verifier=benchmark.verifier)


def _filtered(config: Config, train: Sequence[Row], held_out: Sequence[Row]) -> RowSets:
  """The rows of RL and of the supervised start, where there is one; held-out rows are never filtered."""
  keep, learn = (
    stages.active(stages.pick(row_filters, settings, field))
    for settings, field in ((config.data.keep, 'data.keep'), (config.sft.keep, 'sft.keep'))
  )
  prompts = keep(train, 'config.data.keep') if keep else train
  if not config.sft.steps or not (keep or learn):
    return RowSets(prompts, held_out, prompts)
  return RowSets(prompts, held_out, learn(train, 'config.sft.keep') if learn else train)


def make_table(
  rows: Sequence[Row], data: DataConfig, prompt_tokens: int, tokenizer: Tokenizer
) -> PromptTable:
  """Renders and encodes rows. Prompts longer than prompt_tokens are dropped, never cut.

  Raises UserError for a prompt without tokens, and where no prompt fits.
  """
  examples = encoded(rows, data, tokenizer)
  tokens = [examples[i] for i in range(len(examples))]
  if any(len(t) == 0 for t in tokens):
    raise UserError('a prompt of data has no token at all; see config.data.template and the rows.')
  fitting = [i for i, t in enumerate(tokens) if len(t) <= prompt_tokens]
  if rows and not fitting:
    shortest, longest = min(map(len, tokens)), max(map(len, tokens))
    raise UserError(
      f'every prompt is longer than config.prompt_tokens={prompt_tokens}; raise that: the shortest '
      f'has {shortest} tokens, the longest {longest}.'
    )
  if len(fitting) < len(rows):
    logging.warning(
      '%d of %d rows were dropped: their prompts are longer than config.prompt_tokens=%d '
      '(the longest has %d tokens).',
      len(rows) - len(fitting), len(rows), prompt_tokens, max(map(len, tokens)),
    )  # fmt: skip
  fitting_rows = tuple(rows[i] for i in fitting)
  prompts = tuple(tokens[i] for i in fitting)
  return PromptTable(
    rows=fitting_rows,
    tokens=prompts,
    prompt_tokens=prompt_tokens,
    dropped=len(rows) - len(fitting),
    fingerprint=_fingerprint(fitting_rows, prompts, prompt_tokens),
    from_files=data.source in _FILE_SOURCES,
  )


def encoded(rows: Sequence[Row], data: DataConfig, tokenizer: Tokenizer) -> grain.MapDataset:
  """Returns a lazy random-access data set of int32 token ids, one entry per row."""
  # The elements are indices, because grain flattens elements as pytrees, and `extra` may hold other types.
  dataset = grain.MapDataset.range(len(rows)).map(lambda index: render(rows[index], data))
  return dataset.map(lambda rendered: _encode(rendered, tokenizer))


def encode(row: Row, data: DataConfig, tokenizer: Tokenizer) -> np.ndarray:
  """Returns the prompt of a row as int32 tokens."""
  return _encode(render(row, data), tokenizer)


def with_question(row: Row, template: str, parts: dict[str, str]) -> Row:
  """Returns the row with its question, or its last user message, inserted into a template of {question} and `parts`."""
  if not row.messages:
    return row._replace(question=template.format(question=row.question, **parts))
  messages = [dict(message) for message in row.messages]
  last = max((i for i, m in enumerate(messages) if m['role'] == 'user'), default=len(messages) - 1)
  messages[last]['content'] = template.format(question=messages[last]['content'], **parts)
  return row._replace(messages=tuple(messages))


def render(row: Row, data: DataConfig) -> str | list[dict[str, str]]:
  """Returns the input of the tokenizer: messages if data.chat is set, else text.

  data.system comes first, unless the row has a system message.
  """
  if row.messages:
    _check_messages(data)
    row = with_question(row, data.template, {})
    has_system = any(message['role'] == 'system' for message in row.messages)
    add_system = data.system and not has_system
    system = [dict(role='system', content=data.system)] if add_system else []
    return system + [dict(message) for message in row.messages]
  text = data.template.format(question=row.question)
  if not data.chat:
    return f'{data.system}\n{text}' if data.system else text
  system = [dict(role='system', content=data.system)] if data.system else []
  return [*system, dict(role='user', content=text)]


def prompt_text(row: Row, data: DataConfig) -> str:
  """Returns the text of a prompt without chat markup."""
  rendered = render(row, data)
  is_text = isinstance(rendered, str)
  return rendered if is_text else '\n'.join(message['content'] for message in rendered)


def _encode(rendered: str | list[dict[str, str]], tokenizer: Tokenizer) -> np.ndarray:
  is_text = isinstance(rendered, str)
  ids = tokenizer.encode(rendered) if is_text else tokenizer.encode_chat(rendered)
  return np.asarray(ids, np.int32).reshape(-1)


def pad_rows(sequences: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens int32 [N, width], right-padded with 0, lengths [N])."""
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


def _check_messages(data: DataConfig) -> None:
  if not data.chat:
    raise UserError(
      'config.data.chat=False cannot render prompts that are messages; set config.data.chat=True.'
    )


def _fingerprint(rows: Sequence[Row], tokens: Sequence[np.ndarray], prompt_tokens: int) -> str:
  # The tokens depend on system, template, chat and the tokenizer.
  digest = hashlib.sha256(str(prompt_tokens).encode())
  for row, ids in zip(rows, tokens, strict=True):
    digest.update(repr(_canonical(row)).encode())
    digest.update(ids.tobytes())
  return digest.hexdigest()


def _canonical(value: JsonValue) -> JsonValue:
  """A value that is the same for equal content in every process: without addresses and the order of sets."""
  if isinstance(value, dict):
    return 'dict', sorted((repr(k), _canonical(v)) for k, v in value.items())
  if isinstance(value, list | tuple):
    return [_canonical(v) for v in value]
  if isinstance(value, set | frozenset):
    return 'set', sorted(repr(_canonical(v)) for v in value)
  if isinstance(value, np.generic | np.ndarray):
    return value.tolist()
  is_plain = value is None or isinstance(value, str | bytes | int | float | complex)
  return value if is_plain else type(value).__name__
