"""Published benchmarks as held-out rows: GSM8K, MATH-500, AIME and others of their layouts.

config.evaluation.benchmark names one: 'hub:openai/gsm8k', a folder in the layout of such a repository, or one of its
.parquet or .jsonl files. Columns decide how rows are graded: `question` and `answer` with '#### number' (GSM8K), or
`problem` and `answer`, by `number` where all answers are whole numbers (AIME), else by `math_verify` (MATH-500).
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from absl import logging

from jaxrl_llm.config.loading import near
from jaxrl_llm.data import files
from jaxrl_llm.data.row_formats import to_row
from jaxrl_llm.types import JsonObject, JsonValue, Row, UserError

FIELD = 'config.evaluation.benchmark'
# Hub name → subset and split that hold the problems of the published accuracies.
HUB_NAMES = {
  'openai/gsm8k': dict(subset='main', split='test'),
  'HuggingFaceH4/MATH-500': dict(subset='', split='test'),
  'HuggingFaceH4/aime_2024': dict(subset='', split='train'),
  'yentinglin/aime_2025': dict(subset='', split='train'),
  'math-ai/aime25': dict(subset='', split='test'),
}
_MARK = '####'  # of GSM8K, before the number
_WHOLE_NUMBER = re.compile(r'-?[0-9]+')
_DATA_FILE = re.compile(r'(?P<split>test|train)\b.*\.(?:parquet|jsonl)')


class Benchmark(NamedTuple):
  """The rows of a benchmark and the reward function that verifies them."""

  rows: list[Row]
  verifier: str  # a name for config.rewards.fn


def read(path: str, count: int, seed: int) -> Benchmark:
  """Returns at most `count` rows of a benchmark, a seeded choice in their order.

  Raises UserError for an unknown hub name, a folder without the files of one split, and rows of another layout.
  """
  source, records = _records(path)
  verifier, settings = _layout(path, records)
  rows = {row.id: row for row in (to_row(r, where, settings, source) for where, r in records)}
  chosen = files.choose(list(rows.values()), count, seed)
  if len(chosen) < len(rows):
    logging.warning(
      '%s=%r: %d of %d prompts are evaluated; --config.evaluation.prompts=%d takes all.',
      FIELD, path, len(chosen), len(rows), len(rows),
    )  # fmt: skip
  return Benchmark(chosen, verifier)


def _records(path: str) -> tuple[str, list[tuple[str, JsonValue]]]:
  """(source of the rows in metrics, [(place, record)])."""
  selection: dict[str, str] = {}
  source, found = os.path.basename(os.path.normpath(path)), path
  if path.startswith(files.HUB):
    source = path.removeprefix(files.HUB)
    if source not in HUB_NAMES:
      raise UserError(
        f'{FIELD}={path!r} is no known benchmark; {near(source, HUB_NAMES)}; for another, give a local folder of it.'
      )
    selection = HUB_NAMES[source]
  elif os.path.isdir(path):
    found = _file_of(path)
  elif not os.path.isfile(path):
    raise UserError(
      f'{FIELD}={path!r} does not exist; give a folder or file, or hub: and one of: {", ".join(HUB_NAMES)}.'
    )
  records = list(files.records(found, FIELD, **selection))
  if not records:
    raise UserError(f'{FIELD}={path!r} holds no row; download it again.')
  return source, records


def _file_of(folder: str) -> str:
  """The data file of a folder: of the test split, or of `train` where there is no other; subset main of several."""
  found: dict[str, list[str]] = {'test': [], 'train': []}
  for root, _, names in sorted(os.walk(folder)):
    for name in sorted(names):
      if match := _DATA_FILE.fullmatch(name):
        found[match['split']].append(os.path.relpath(os.path.join(root, name), folder))
  candidates = found['test'] or found['train']
  main = [name for name in candidates if name.split(os.sep)[0] == 'main']
  candidates = main or candidates
  if len(candidates) != 1:
    problem = f'holds {len(candidates)} files of one split' if candidates else 'holds no file'
    raise UserError(
      f'{FIELD}={folder!r} {problem} named test*.parquet, test*.jsonl or train*.…; name the file itself.'
    )
  return os.path.join(folder, candidates[0])


def _layout(path: str, records: list[tuple[str, JsonValue]]) -> tuple[str, JsonObject]:
  """(verifier, settings of `to_row`) for the columns that all records have."""
  where = f'{FIELD}={path!r}'
  for place, record in records:
    if not isinstance(record, dict) or not isinstance(record.get('answer'), str | int):
      raise UserError(
        f"{place} has no text or number under 'answer'; give a benchmark with answers."
      )
  answers = [str(record['answer']) for _, record in records]
  if all('problem' in record for _, record in records):
    whole = all(_WHOLE_NUMBER.fullmatch(answer.strip()) for answer in answers)
    columns = dict(question='problem', answer='answer')
    return 'number' if whole else 'math_verify', dict(columns=columns)
  is_gsm8k = all('question' in record for _, record in records)
  if is_gsm8k and all(_MARK in answer for answer in answers):
    return 'number', dict(columns=dict(question='question', answer='answer'), answer_after=_MARK)
  raise UserError(
    f"{where} has neither the columns problem and answer (MATH-500, AIME) nor question and answer with '{_MARK} "
    "number' (GSM8K); evaluate such rows with config.data.eval_path and config.rewards.fn."
  )
