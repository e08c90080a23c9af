"""The results of a run: held-out measures with intervals before and after, and one good and one bad completion."""

from __future__ import annotations

import json
import os
import re
import zlib

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.report.rollouts import JsonObject, RolloutFile, Rollouts

_OWN = re.compile(
  r'step_\d+\.json'
)  # other names are evaluations with other settings than the run's
_KINDS = ('greedy', 'mean', 'pass', 'best', 'maj', 'vote')
_SHOWN_CHARS = 2000  # of a text in an example
_SEARCHED_FILES = 20  # the newest, for examples
_ALL = 'val-core/all/acc/'


def evaluations(folder: str) -> list[JsonObject]:
  """The evaluations on disk in the order of their steps: step, metrics, prompts, and `measures` of all data.

  A measure is [mean, low, high] with an interval of 95 %; low and high are None where the file has no interval.
  """
  eval_folder, found = os.path.join(folder, 'eval'), []
  for name in sorted(os.listdir(eval_folder)) if os.path.isdir(eval_folder) else []:
    record = _read_json(os.path.join(eval_folder, name)) if _OWN.fullmatch(name) else {}
    metrics = record.get('metrics')
    if isinstance(metrics, dict) and isinstance(record.get('step'), int):
      numbers = {k: v for k, v in sorted(metrics.items()) if isinstance(v, int | float)}
      prompts, measures = _measures(record, numbers)
      entry = dict(step=record['step'], metrics=numbers, prompts=prompts, measures=measures)
      found.append(entry)
  return sorted(found, key=lambda evaluation: evaluation['step'])


def _measures(
  record: JsonObject, metrics: dict[str, float]
) -> tuple[int | None, dict[str, list[float | None]]]:
  """(number of prompts, measures of all data), the most important first."""
  try:
    group = record['groups'][0]
    prompts = int(group['prompts'])
    found = {k: [v['mean'], v['low'], v['high']] for k, v in group['measures'].items()}
  except (KeyError, IndexError, TypeError, ValueError):  # of an earlier version
    prompts = None
    found = {
      k.removeprefix(_ALL): [v, None, None] for k, v in metrics.items() if k.startswith(_ALL)
    }
  # best@n equals pass@n where scores are 0 and 1.
  for name in [name for name in found if name.startswith('best@')]:
    if found.get(name.replace('best', 'pass')) == found[name]:
      del found[name]
  return prompts, dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> tuple[int, str]:
  kind = name.split('@')[0]
  return (_KINDS.index(kind) if kind in _KINDS else len(_KINDS)), name


def examples(rollouts: Rollouts) -> JsonObject:
  """The best and the worst completion of a group, as {good: …, bad: …}; {} without rollouts.

  The group is the newest in which some completions are right and others wrong, else the newest of all.
  """
  first, newest = len(rollouts.column('step')), {}
  for file in rollouts.files[: -_SEARCHED_FILES - 1 : -1]:
    first -= len(file.columns)
    if not (rows := _rows(file)):
      continue
    good, bad = _extremes(rows)
    found = dict(good=_example(rows[good], first + good), bad=_example(rows[bad], first + bad))
    newest = newest or found
    if found['good']['right'] != found['bad']['right']:
      return found
  return newest


def _extremes(rows: list[JsonObject]) -> tuple[int, int]:
  """Indices of the best and the worst row of the group whose rewards differ most."""
  groups: dict[int, list[int]] = {}
  for index, row in enumerate(rows):
    groups.setdefault(row['prompt'], []).append(index)

  def rank(index: int) -> tuple[bool, float, int]:
    row = rows[index]
    return bool(row.get('right')), float(row['score']), -len(str(row.get('output', '')))

  def spread(group: list[int]) -> tuple[bool, float]:
    best, worst = rank(max(group, key=rank)), rank(min(group, key=rank))
    return best[0] != worst[0], best[1] - worst[1]

  group = max(groups.values(), key=spread)
  return max(group, key=rank), min(group, key=rank)


def _rows(file: RolloutFile) -> list[JsonObject]:
  if not file.text:
    return []
  lines = zlib.decompress(file.text).decode('utf-8', 'replace').split('\n')
  return [json.loads(line) for line in lines if line]


def _example(row: JsonObject, index: int) -> JsonObject:
  question = row.get('input', '')
  if not isinstance(question, str):
    question = '\n'.join(str(message.get('content', '')) for message in question)
  fields = dict(index=index, step=row['step'], prompt=row['prompt'], score=float(row['score']))
  texts = dict(question=question, output=str(row.get('output', '')), gts=str(row.get('gts', '')))
  cut = {k: v if len(v) <= _SHOWN_CHARS else f'{v[:_SHOWN_CHARS]} …' for k, v in texts.items()}
  return fields | cut | dict(right=bool(row.get('right', float(row['score']) >= 1)))


def _read_json(path: str) -> JsonObject:
  try:
    value = json.loads(safe_files.read(path).decode(errors='replace'))
  except (OSError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}
