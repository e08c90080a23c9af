"""Pairs of completions for reward models: TRL's preference format, as text or as messages.

A row has `chosen` and `rejected`, and may have `prompt` and `margin`. Without a prompt both begin with it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, TypeAlias

from jaxrl_llm.data import files
from jaxrl_llm.data.row_formats import check, read_prompt
from jaxrl_llm.data.tasks import make_row
from jaxrl_llm.types import JsonObject, JsonValue, Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import DataConfig

_Text: TypeAlias = 'str | list[dict[str, str]]'  # or messages
_SIDES = ('chosen', 'rejected')
_NEEDED = "a pair needs 'chosen' and 'rejected', and may have 'prompt' and 'margin'"


def load_pairs(data: DataConfig, held_out: int) -> tuple[list[Row], list[Row]]:
  """(training rows, held-out rows) of the file data.path, with `chosen`, `rejected` and `margin` in `extra`.

  At most `held_out` pairs come from data.eval_path, or from a seeded split of at most a fifth of the prompts, one of
  each; no prompt is in both sets. Raises UserError with the number of the line for a row that is no pair.
  """
  if data.source != 'jsonl':
    raise UserError(
      f'config.data.source={data.source!r} has no pairs for a reward model; set --config.data.source=jsonl '
      '--config.data.path=pairs.jsonl.'
    )
  where, rows = f'config.data.path={data.path!r}', _read(data.path, 'config.data.path')
  training_rows, held_out_rows = files.separate(rows, _read, data, held_out, where)
  return files.first(training_rows, data.size, where), held_out_rows


def to_pair(record: JsonValue, where: str) -> Row:
  """The Row of a JSON object in TRL's preference format; `where` is its place in messages.

  Raises UserError for missing fields, for texts beside messages, for equal completions, and for a margin that is no
  finite number.
  """
  if not isinstance(record, dict):
    raise UserError(f'{where} is no JSON object but a {type(record).__name__}; write {{...}}.')
  check(record, where)
  for side in _SIDES:
    if record.get(side) is None:
      raise UserError(f'{where} has no {side!r}; {_NEEDED}.')
  chosen, rejected = (read_prompt(record[side], f'{where}: {side!r}') for side in _SIDES)
  prompt = record.get('prompt')
  if prompt is None:
    prompt, chosen, rejected = _without_prompt(chosen, rejected)
  else:
    prompt = read_prompt(prompt, f"{where}: 'prompt'")
  if len({type(part) for part in (prompt, chosen, rejected)}) > 1:
    raise UserError(
      f"{where} mixes text and messages; write 'prompt', 'chosen' and 'rejected' all as text, or all as messages."
    )
  if chosen == rejected:
    raise UserError(
      f"{where}: 'chosen' and 'rejected' are equal, which is no preference; remove it."
    )
  extra: JsonObject = dict(chosen=chosen, rejected=rejected, margin=_margin(record, where))
  row = make_row('preferences', prompt, json.dumps([chosen, rejected], sort_keys=True), extra)
  return row._replace(answer='')


def _read(path: str, field: str) -> list[Row]:
  rows = {row.id: row for row in (to_pair(x, where) for where, x in files.records(path, field))}
  if not rows:
    raise UserError(f'{field}={path!r} holds no row; give a file with one JSON object per line.')
  return list(rows.values())


def _without_prompt(chosen: _Text, rejected: _Text) -> tuple[_Text, _Text, _Text]:
  """(prompt, chosen, rejected), where the prompt is what both begin with: characters of texts, or whole messages."""
  if type(chosen) is not type(rejected):
    return chosen, chosen, rejected  # reported as a mixture
  pairs = enumerate(zip(chosen, rejected, strict=False))
  shared = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
  return chosen[:shared], chosen[shared:], rejected[shared:]


def _margin(record: JsonObject, where: str) -> float:
  margin = record.get('margin')
  if margin is None:
    return 0.0
  if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
    raise UserError(f"{where}: 'margin' is {margin!r}; give a number, or leave it out.")
  return float(margin)
