"""Groups of completions as text that independent runs exchange through a folder: SAPO's swarm sampling.

Each run writes one file a step, FOLDER/RUN/step_00000012.jsonl, a group a line, and reads those of all others. Files
appear whole, by renaming; their writer removes all but its newest ones. Runs may begin, end and be killed at any time.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.replay.rollout_buffer import slots_of_share
from jaxrl_llm.types import Batch, JsonObject, Row, Settings

FILES = 16  # of a run, at most
_FILE_BYTES = 2**26  # a larger file is not read
_FILE = re.compile(r'step_\d{8}\.jsonl')


class Completion(NamedTuple):
  """One completion of a group."""

  text: str
  stopped: bool  # it ended with an end token


class SharedGroup(NamedTuple):
  """A row of data and completions of its prompt."""

  row: Row
  completions: tuple[Completion, ...]


class SharedRollouts:
  """The groups of other runs that wait to be learned, each at most once. arXiv:2509.08721 (SAPO)."""

  rows = 0  # that join the groups of fresh rows

  def __init__(self, folder: str, share: float, max_age: int, most: int):
    """`share` of a batch's slots are for groups of other runs, which wait up to `max_age` steps; `most` at once."""
    self.folder, self.share, self.max_age, self.most = folder, share, max_age, most
    self.run = ''  # the name of the run's own folder; '' until it publishes
    self.waiting: list[tuple[int, SharedGroup]] = []  # with the step of arrival, oldest first
    self.files_read: set[str] = set()
    self.counts: dict[str, int] = {}  # of the last exchange

  def slots(self, prompts: int) -> int:
    """Slots for groups of other runs beside `prompts` sampled ones. Raises UserError where there is none."""
    return slots_of_share(self.share, prompts)

  def publish(self, groups: Sequence[SharedGroup], step: int) -> None:
    """Write a step's groups for other runs; a folder that fails is counted, and the run goes on alone."""
    self.counts = dict(published=0, received=0, malformed=0, errors=0)
    if not groups:
      return
    self.run = self.run or secrets.token_hex(8)
    own = os.path.join(self.folder, self.run)
    lines = ''.join(to_line(group) + '\n' for group in groups)
    try:
      safe_files.remove_parts(own)  # of a killed process of this run
      safe_files.write(os.path.join(own, f'step_{step:08d}.jsonl'), lines)
      for name in _files(own)[:-FILES]:
        os.remove(os.path.join(own, name))
    except OSError:
      self.counts['errors'] += 1
    else:
      self.counts['published'] = len(groups)

  def collect(self, step: int) -> None:
    """Read the new files of all other runs; groups beyond `max_age` or `most` are dropped, the oldest first."""
    present: set[str] = set()
    for run in _names(self.folder):
      others = _files(os.path.join(self.folder, run)) if run != self.run else []
      for name in others[-FILES:]:
        file = f'{run}/{name}'
        present.add(file)
        if file not in self.files_read:
          self._read(file, step)
    self.files_read &= present
    recent = [(arrived, group) for arrived, group in self.waiting if step - arrived <= self.max_age]
    self.waiting = recent[-self.most :]

  def _read(self, file: str, step: int) -> None:
    path = os.path.join(self.folder, file)
    try:
      content = safe_files.read(path) if os.path.getsize(path) <= _FILE_BYTES else b'too large'
    except FileNotFoundError:  # its run has removed it
      return
    except OSError:
      self.counts['errors'] += 1
      return
    self.files_read.add(file)
    groups = [from_line(line) for line in content.split(b'\n') if line]
    found = [group for group in groups if group is not None]
    self.waiting += [(step, group) for group in found]
    self.counts['received'] += len(found)
    self.counts['malformed'] += len(groups) - len(found)

  def draw(self, count: int, seed: int, step: int) -> list[SharedGroup]:
    """Up to `count` waiting groups, which leave; uniformly without replacement, by (seed, step)."""
    order = np.random.default_rng((seed, 11, step)).permutation(len(self.waiting))[:count].tolist()
    drawn = [self.waiting[i][1] for i in order]
    self.waiting = [pair for i, pair in enumerate(self.waiting) if i not in order]
    return drawn

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a batch with `fresh` sampled slots, and of the last exchange."""
    length_PxG = np.asarray(batch.rollout.length_B).reshape(len(batch.prompts.index_P), -1)
    counts = self.counts | dict(waiting=len(self.waiting))
    shared = {f'shared/{name}_groups': count for name, count in counts.items() if name != 'errors'}
    shared['shared/errors'] = counts.get('errors', 0)
    return shared | {'replay/rows': int((length_PxG[fresh:] > 0).sum())}

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    waiting = [dict(arrived=arrived, line=to_line(group)) for arrived, group in self.waiting]
    return dict(run=self.run, files_read=sorted(self.files_read), waiting=waiting)

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    self.run, self.files_read = str(state['run']), set(state['files_read'])
    restored = [(int(pair['arrived']), from_line(pair['line'])) for pair in state['waiting']]
    self.waiting = [(arrived, group) for arrived, group in restored if group is not None]


def to_line(group: SharedGroup) -> str:
  """A group as one line of JSON."""
  completions = [completion._asdict() for completion in group.completions]
  # Data files may hold values without a form in JSON, such as dates.
  return json.dumps(dict(row=group.row._asdict(), completions=completions), default=str)


def from_line(line: str | bytes) -> SharedGroup | None:
  """The inverse of `to_line`; None for a line that is none of its results."""
  try:
    fields = json.loads(line)
    json.dumps(fields, ensure_ascii=False).encode()  # tokenizers refuse lone surrogates
    row = Row(**fields['row'])
    completions = tuple(Completion(**completion) for completion in fields['completions'])
  except (ValueError, TypeError, KeyError, RecursionError):
    return None
  messages = row.messages if isinstance(row.messages, list) else [None]
  valid = (
    _are((row.id, row.question, row.answer, row.source, *(c.text for c in completions)), str)
    and _are([c.stopped for c in completions], bool)
    and isinstance(row.extra, dict)
    and all(isinstance(m, dict) and _are([*m, *m.values()], str) for m in messages)
    and all(message.keys() >= {'role', 'content'} for message in messages)
    and bool(completions)
  )
  return SharedGroup(row._replace(messages=tuple(messages)), completions) if valid else None


def _are(values: Sequence[object], kind: type) -> bool:
  return all(isinstance(value, kind) for value in values)


def _files(run: str) -> list[str]:
  """Names of the step files of a run, oldest first."""
  return [name for name in _names(run) if _FILE.fullmatch(name)]


def _names(folder: str) -> list[str]:
  """What is in a folder, sorted; nothing where it cannot be listed."""
  try:
    return sorted(os.listdir(folder))
  except OSError:
    return []
