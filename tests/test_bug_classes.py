"""Eighteen classes of bugs in other trainers: the table in tests/bug_classes.md names the tests against each.

Most of these tests are beside the code that they test; those about several packages are here.
"""

from __future__ import annotations

import ast
import pathlib
import re
import threading
import types
from unittest import mock

import bad_input
import numpy as np
import pytest

from jaxrl_llm import rewards, train
from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.config import loading
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.rollout import sampling
from jaxrl_llm.runner import grading, resume
from jaxrl_llm.types import Row, UserError

ROOT = pathlib.Path(__file__).parents[1]


def table() -> list[list[str]]:
  text = (ROOT / 'tests' / 'bug_classes.md').read_text().split('<!-- bug classes -->')
  assert len(text) == 3
  lines = [line for line in text[1].splitlines() if line.startswith('|')][2:]
  return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]


def test_every_class_has_tests_that_exist_or_a_reason():
  rows = table()
  assert [int(row[0]) for row in rows] == list(range(1, 19))
  for number, _, tests, asserts in rows:
    named = re.findall(r'`(tests/[\w/]+\.py)::(test_\w+)`', tests)
    assert named or tests == '–', number
    assert asserts
    for file, name in named:
      assert f'def {name}(' in (ROOT / file).read_text(), f'{number}: {file}::{name}'


def context_of(*overrides: str):
  """The run context, before anything is compiled."""
  calls = []
  with (
    bad_input.up_to_compiling(),
    mock.patch.object(train, '_train', lambda *a: calls.append(a) or {}),
  ):
    message = bad_input.sentence(*bad_input.outcome(bad_input.job(), *overrides))
  assert not message, message
  return calls[0][0]


def test_filters_of_evaluation_never_reach_training():
  """Class 4: top-p in training would bias every ratio. Training has no such field, and ignores that of evaluation."""
  for name in ('top_p', 'top_k', 'min_p'):
    for part in ('', 'rollout.', 'objective.'):
      with pytest.raises(UserError, match=f'{name} is unknown'):
        loading.load('', [f'--config.{part}{name}=1'])
  context = context_of(
    '--config.evaluation.sampling.top_p=0.5', '--config.evaluation.sampling.top_k=3'
  )
  assert context.config.evaluation.sampling.top_p == 0.5
  assert context.spec.rollout.decode.token_filter == sampling.NO_FILTER


def test_graders_are_killed_from_a_thread_that_is_not_the_main_one(tmp_path, monkeypatch):
  """Class 10: a time limit by SIGALRM works only in the main thread, and its failure looked like a wrong answer."""
  (tmp_path / 'threaded_judge.py').write_text(
    'def judge(data_source, solution_str, ground_truth, extra_info=None):\n'
    "  while solution_str == 'loop': pass\n"
    '  return float(solution_str == ground_truth)\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  rows = [Row('id', 'q', (), 'a', 's', {})] * 3
  spec = dict(fn='threaded_judge:judge', right=1.0, parts=(), workers=1, deadline_s=2.0)
  found = []
  with rewards.Pool(spec) as pool:
    thread = threading.Thread(target=lambda: found.append(pool.score(rows, ['a', 'loop', 'b'])))
    thread.start()
    thread.join(120)
  (scores,) = found
  assert scores.reward_B.tolist() == [1.0, 0.0, 0.0]
  assert scores.outcome_B.tolist() == [rewards.OK, rewards.TIMEOUT, rewards.OK]
  assert scores.counts['grade/timeouts'] == 1


def test_other_data_than_a_checkpoint_was_made_with_is_refused():
  """Class 13: a resumed run would skip the first rows of a data set that is new to it."""
  context = context_of()
  folder = types.SimpleNamespace(root='/run', checkpoints='/run/checkpoints')
  saved = (None, None), dict(fingerprint='of other data')
  with (
    mock.patch.object(checkpoint, 'latest', lambda path, step: 4),
    mock.patch.object(checkpoint, 'restore', lambda *a: saved),
    mock.patch.object(
      train_state, 'abstract_state', lambda spec: types.SimpleNamespace(_replace=dict)
    ),
    pytest.raises(UserError, match='the data of /run changed since step 4'),
  ):
    resume.restore(context, folder, None)


def test_only_the_completion_is_graded():
  """Class 17: a prompt that contains the right answer, or asks for its form, must not be rewarded."""
  context = context_of('--config.data.system=1')
  table_ = context.tables.train
  prompts = table_.prompts(np.arange(4))
  rollout = empty_records.empty_rollout(context.spec)
  end = context.models.policy.tokenizer.end_ids[0]
  answer = context.models.policy.tokenizer.encode('9')
  tokens = np.zeros_like(rollout.tokens_BxT)
  tokens[:, : len(answer) + 1] = [*answer, end]
  rollout = rollout._replace(
    tokens_BxT=tokens, length_B=np.full(len(tokens), len(answer) + 1, np.int32)
  )
  texts = []

  class Pool:
    def score(self, rows, completions):
      texts.extend(completions)
      return rewards.Scores(
        np.zeros((len(completions), 1), np.float32), np.zeros(len(completions), np.int8), {}, ''
      )

  grading.grade(context, Pool(), prompts, rollout)
  assert texts and set(texts) == {'9'}
  assert all(row.answer for row in table_.rows)


# Names of calls that execute text or files.
_RUNS = re.compile(
  r'(builtins\.)?(eval|exec|compile|__import__)|(subprocess|runpy|marshal)\.\w+|os\.(system|popen|exec\w+|spawn\w+)'
  r'|(c?pickle|dill|yaml|torch|joblib|shelve)\.(load|loads|unsafe_load|open|Unpickler)'
)
# Calls that are allowed, with the reason.
_ALLOWED = {
  'config/loading.py': {'runpy.run_path'},  # a config file is the user's program
  'checkpointing/run_dir.py': {'subprocess.run'},  # git
  'models/default_model.py': {'subprocess.run'},  # pip
  'models/untrusted.py': {
    'subprocess.run',
    'runpy.run_path',
  },  # files of the package, within limits
  'environments/harness.py': {'subprocess.run'},  # config.environment.command, the user's agent
  'rewards/worker.py': {'pickle.loads'},  # pickled by its own parent process
  'rewards/code_execution/graders.py': {'compile'},  # checks the syntax; nothing runs
  'rewards/code_execution/sandbox.py': {'subprocess.run', 'subprocess.Popen'},  # the sandbox
  'rewards/code_execution/guest_protocol/program_peer.py': {
    'exec',
    'compile',
  },  # inside the sandbox
  'rewards/code_execution/guest_protocol/tests_runner.py': {
    'exec',
    'compile',
    'eval',
  },  # tests of a row, inside the sandbox
}


def test_no_text_of_a_model_or_a_file_is_executed():
  """Class 18."""
  for path in sorted((ROOT / 'jaxrl_llm').rglob('*.py')):
    name = str(path.relative_to(ROOT / 'jaxrl_llm'))
    for node in ast.walk(ast.parse(path.read_text())):
      if not isinstance(node, ast.Call):
        continue
      called = ast.unparse(node.func)
      allowed = _ALLOWED.get(name, ())
      assert not _RUNS.fullmatch(called) or called in allowed, f'{name}: {called}'
      for keyword in node.keywords:
        value = getattr(keyword.value, 'value', None)
        assert not (keyword.arg in ('shell', 'allow_pickle') and value is not False), name


def test_no_pattern_repeats_a_group_possessively():
  # Python before 3.11.5 mismatches '(?:…)*+' (CPython gh-106052); an atomic group does the same.
  found = []
  for path in (ROOT / 'jaxrl_llm').rglob('*.py'):
    constants = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    texts = [node.value for node in constants if isinstance(node.value, str)]
    found += [(path.name, text) for text in texts if re.search(r'(?<!\\)\)[*+?]\+', text)]
  assert not found
