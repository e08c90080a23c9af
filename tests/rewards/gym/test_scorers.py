"""The scorers of reasoning-gym that evaluate text, and the parsers that replace the evaluation."""

from __future__ import annotations

import ast
import contextlib
import functools
import pathlib
import sys
import threading
import tomllib
from fractions import Fraction

import numpy as np
import pytest

from jaxrl_llm import models, rewards
from jaxrl_llm.config import loading
from jaxrl_llm.rewards import verifiers
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.rewards.gym import sandboxed, scorers
from jaxrl_llm.rewards.parsing import safe_eval
from jaxrl_llm.runner import setup
from jaxrl_llm.types import Row, UserError
from tests.rewards.gym import gym_attacks
from tests.rewards.gym.gym_attacks import OF_SYMPY, row_of

reasoning_gym = pytest.importorskip('reasoning_gym')
ROOT = pathlib.Path(__file__).parents[3]

# Names that evaluate text, or give access to such functions.
_EVALUATES = frozenset(
  'eval exec compile parse_expr sympify nsimplify lambdify parse_latex parse_mathematica literal_eval getattr setattr '
  'delattr globals locals vars __builtins__ builtins __import__ import_module importlib runpy ctypes system popen '
  'Popen subprocess check_output pickle marshal shelve dill yaml open urlopen socket load loadtxt genfromtxt '
  'fromstring format_map Template'.split()
)
# Evaluations of reasoning-gym 0.1.25 in its scorers and their helpers.
IN_SCORERS = {
  'algebra/intermediate_integration.py:IntermediateIntegrationDataset.score_answer': {'parse_expr'},
  'algebra/polynomial_multiplication.py:PolynomialMultiplicationDataset.score_answer': {
    'parse_expr'
  },
  'algebra/simple_integration.py:SimpleIntegrationDataset.score_answer': {'parse_expr'},
  'algorithmic/binary_matrix.py:BinaryMatrixDataset.score_answer': {'eval'},
  'algorithmic/number_sorting.py:NumberSortingDataset.score_answer': {'eval'},
  'algorithmic/spiral_matrix.py:SpiralMatrixDataset.score_answer': {'eval'},
  'algorithmic/string_insertion.py:StringInsertionDataset.score_answer': {'eval'},
  'arithmetic/bitwise_arithmetic.py:verify_solution': {'eval'},
  'games/countdown.py:CountdownDataset.score_answer': {'parse_expr'},
  'games/n_queens.py:NQueensDataset.score_answer': {'eval'},
  'games/puzzle24.py:Puzzle24Dataset.score_answer': {'parse_expr'},
}
# Other evaluations, all reviewed: generators evaluate text and files of the package, and no scorer calls the rest. Two
# are in scorers: pool_matrix passes loadtxt a list of lines, and propositional_logic defines its own parse_expr.
ELSEWHERE = {
  'algorithmic/group_anagrams.py:GroupAnagramsDataset.__init__': {'open'},
  'algorithmic/pool_matrix.py:PoolMatrixDataset.score_answer': {'loadtxt'},
  'algorithmic/word_ladder.py:WordLadderDataset._load_words_from_csv': {'open'},
  'arc/rearc_utils/utils.py:get_generators': {'getattr'},
  'arc/rearc_utils/utils.py:get_verifiers': {'getattr'},
  'arithmetic/basic_arithmetic.py:eval_floordiv': {'eval'},
  'arithmetic/bitwise_arithmetic.py:generate_problem': {'eval'},
  'arithmetic/gsm_symbolic/generators_00_49.py:generate_32.generate_example': {'eval'},
  'arithmetic/gsm_symbolic/generators_50_99.py:generate_69.generate_from_variables': {'eval'},
  'arithmetic/gsm_symbolic/gsm_symbolic.py:GSMSymbolicDataset._load_generators': {'getattr'},
  'coaching/curriculum_config.py:': {'yaml'},
  'coaching/curriculum_config.py:CurriculumExperimentConfig.from_yaml': {'open'},
  'coaching/curriculum_config.py:CurriculumExperimentConfig.from_yaml_stream': {'yaml'},
  'code/bf.py:BFDataset.compile_bfit_code_to_bf': {'compile'},
  'code/codeio.py:CodeIODataset.__init__': {'open'},
  'code/codeio.py:CodeIODataset._generate_io_pair': {'exec'},
  'code/contrib/bfit/BF-it.py:compile_file': {'compile', 'open'},
  'code/contrib/bfit/Compiler/Compiler.py:': {'compile'},
  'code/contrib/bfit/Compiler/Compiler.py:compile': {'compile'},
  'code/contrib/bfit/Interpreter.py:': {'open'},
  'cognition/figlet_fonts.py:FigletFontDataset.__init__': {'open'},
  'composite.py:': {'yaml'},
  'composite.py:CompositeConfig.from_yaml': {'open'},
  'composite.py:CompositeConfig.from_yaml_stream': {'yaml'},
  'games/contrib/sokoban/src/bfs.py:': {'loadtxt'},
  'games/contrib/sokoban/src/game.py:Game.load_puzzle': {'open'},
  'games/countdown.py:': {'parse_expr'},
  'games/puzzle24.py:': {'parse_expr'},
  'games/rush_hour.py:RushHourDataset.__init__': {'open'},
  'induction/acre/blicket.py:': {'load', 'open'},
  'induction/list_functions/list_functions.py:ListFunctionsDataset._load_generators': {'getattr'},
  'logic/aiw.py:': {'Template'},
  'logic/aiw.py:AliceInWonderlandDataset.__init__': {'Template'},
  'logic/propositional_logic.py:': {'parse_expr'},
  'logic/propositional_logic.py:Expression.from_string': {'parse_expr'},
  'logic/propositional_logic.py:parse_expr': {'parse_expr'},
}


class _Names(ast.NodeVisitor):
  """Function → its names of _EVALUATES: used, imported, defined, or as an attribute."""

  def __init__(self, path: str):
    self.path, self.scope, self.names = path, [], {}

  def note(self, name: str) -> None:
    if name in _EVALUATES:
      self.names.setdefault(f'{self.path}:{".".join(self.scope)}', set()).add(name)

  def _scoped(self, node: ast.FunctionDef | ast.ClassDef) -> None:
    if not isinstance(node, ast.ClassDef) and not any(c for c in self.scope if c[0].isupper()):
      self.note(node.name)
    self.scope.append(node.name)
    self.generic_visit(node)
    self.scope.pop()

  visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scoped

  def visit_Name(self, node: ast.Name) -> None:
    self.note(node.id)

  def visit_Attribute(self, node: ast.Attribute) -> None:
    if not (node.attr == 'compile' and ast.unparse(node.value) == 're'):
      self.note(node.attr)
    self.generic_visit(node)

  def visit_alias(self, node: ast.alias) -> None:
    for name in (*node.name.split('.'), node.asname or ''):
      self.note(name)


def evaluating(root: pathlib.Path) -> dict[str, set[str]]:
  evaluations = {}
  for path in sorted(root.rglob('*.py')):
    names = _Names(str(path.relative_to(root)))
    names.visit(ast.parse(path.read_text()))
    evaluations |= names.names
  return evaluations


def test_the_installed_package_evaluates_only_where_it_was_reviewed():
  """After a failure, review the scorers of the new version, then change rewards/gym/scorers.py."""
  assert evaluating(pathlib.Path(reasoning_gym.__path__[0])) == IN_SCORERS | ELSEWHERE
  modules = {f'{module.replace(".", "/")}.py' for module, *_ in scorers.EVALUATING.values()}
  assert modules == {place.partition(':')[0] for place in IN_SCORERS}


@pytest.mark.parametrize(
  'source',
  [
    'def score(a): return eval(a)',
    'run = eval\ndef score(a): return run(a)',
    'from sympy import sympify as read',
    'class D:\n  def score_answer(self, answer, entry): return [*map(exec, [answer])]',
    'def score(a): return sympy.parsing.sympy_parser.parse_expr(a)',
    'score = lambda a: __builtins__["ev" + "al"](a)',
    'import pickle as p',
    'def score(a): return getattr(a, a)',
    '@exec\ndef score(a): pass',
    'def score(a, run=eval): return run(a)',
  ],
)
def test_a_planted_evaluation_is_found(source, tmp_path):
  (tmp_path / 'planted.py').write_text(source)
  assert evaluating(tmp_path)


def test_every_task_of_the_package_is_in_one_table_and_its_version_is_bounded():
  from reasoning_gym.factory import DATASETS

  assert set(DATASETS) - {'composite'} == scorers.TASKS
  assert not scorers.PLAIN & scorers.EVALUATING.keys()
  extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
  assert extras['gym'] == ['reasoning-gym>=0.1.25,<0.1.26']


@pytest.mark.parametrize('task', sorted(scorers.EVALUATING))
def test_a_copy_has_parsers_wherever_its_scorer_evaluates(task):
  copy = scorers.safe_scorer(task, {}).func
  todo, visited = [copy], []
  while todo:
    function = todo.pop()
    visited.append(function)
    for name in function.__code__.co_names:
      value = function.__globals__.get(name)
      assert name not in ('exec', 'compile', 'getattr', '__import__', 'open')
      if name in ('eval', 'parse_expr') and value is not None:
        assert value.__module__ == safe_eval.__name__, name
      elif name == 'eval':
        raise AssertionError('Python’s own eval')
      if name in ('sympy', 'sp'):
        assert value.parse_expr is safe_eval.algebra and value.Symbol is safe_eval.symbol
      if name == 'verify_solution':
        todo.append(value)
  # The package itself is unchanged.
  module = sys.modules[copy.__globals__['__name__']]
  assert 'eval' not in vars(module)
  assert all(
    function.__code__ is vars(module).get(function.__name__, function).__code__
    for function in visited[1:]
  )


@functools.cache
def entries(task: str, size: int) -> tuple:
  dataset = reasoning_gym.create_dataset(task, seed=3, size=size)
  return dataset, [dataset[index] for index in range(size)]


@pytest.mark.parametrize('task', sorted(scorers.TASKS))
def test_right_answers_are_scored_as_the_package_scores_them(task):
  dataset, known = entries(task, 12 if task in scorers.EVALUATING else 3)
  for index, entry in enumerate(known):
    gym = dict(name=task, settings={}, answer=entry['answer'])
    extra = dict(gym=gym, metadata=entry['metadata'])
    row = Row(str(index), entry['question'], (), str(entry['answer']), 'gym', extra)
    # Some generators give answers that are not text, and a completion is stripped.
    expected = float(dataset.score_answer(str(entry['answer']).strip(), entry))
    if task in OF_SYMPY:
      score = scorers.safe_scorer(task, {})(row.answer, entry)
    else:
      score = verifiers.gym(row.answer, row)
    assert score == expected, entry['answer']
    assert expected == 1 or task not in scorers.EVALUATING or task == 'intermediate_integration'


_LEVELS = dict(
  binary_matrix=dict(min_n=20, max_n=60), bitwise_arithmetic=dict(difficulty=9),
  countdown=dict(min_numbers=8, max_numbers=12, max_value=5000, max_target=10_000),
  number_sorting=dict(min_numbers=80, max_numbers=100), spiral_matrix=dict(min_n=40, max_n=60),
  polynomial_multiplication=dict(
    min_terms=6, max_terms=8, max_value=100_000_000, max_degree=8, min_polynomials=4, max_polynomials=5
  ),
)  # fmt: skip


@pytest.mark.parametrize('task', sorted(_LEVELS))
def test_right_answers_of_hard_levels_are_parsed(task):
  dataset = reasoning_gym.create_dataset(task, seed=2, size=2, **_LEVELS[task])
  for entry in dataset:
    assert scorers.safe_scorer(task, _LEVELS[task])(entry['answer'], entry) == 1


def test_lists_get_the_partial_credit_of_the_package():
  for task, credit in (
    ('spiral_matrix', 0.1),
    ('binary_matrix', 0.1),
    ('n_queens', 0.5),
    ('string_insertion', 0.1),
  ):
    dataset, known = entries(task, 12)
    for entry in known[:3]:
      answer = str(entry['answer'])
      lines = [line.split() for line in answer.split('\n')]
      text = {'spiral_matrix': answer.split(), 'string_insertion': list(answer)}.get(task, lines)
      text = str(text).replace("'", '') if task in ('spiral_matrix', 'binary_matrix') else str(text)
      expected = dataset.score_answer(text, entry)
      assert expected == credit
      assert (
        verifiers.gym(text, row_of(task, answer=entry['answer'], metadata=entry['metadata']))
        == credit
      )


class _Watch:
  """Records Python's audit events of this thread while it is on: code compiled or run, files opened, processes
  started."""

  events = frozenset(
    {
      'compile',
      'exec',
      'open',
      'import',
      'pickle.find_class',
      'ctypes.dlopen',
      'os.system',
      'os.exec',
    }
  )

  def __init__(self):
    self.records, self.thread = [], 0
    sys.addaudithook(self._hook)

  def _hook(self, event: str, arguments: tuple) -> None:
    if self.thread == threading.get_ident():
      named = event in self.events or event.startswith(('subprocess.', 'socket.', 'shutil.', 'os.'))
      if named and not (event == 'compile' and arguments[0] is None):
        self.records.append((event, str(arguments)[:200]))

  @contextlib.contextmanager
  def on(self):
    self.records, self.thread = [], threading.get_ident()
    try:
      yield self.records
    finally:
      self.thread = 0


_WATCH = _Watch()


def test_the_watch_records_evaluation():
  with _WATCH.on() as records:
    eval('1 + 1')
  assert {event for event, _ in records} == {'compile', 'exec'}


_TEXTS = (
  "__import__('os').system(': > MARK')", "open('MARK', 'w')", '[1]', '{"a": "__import__(\'os\')"}', '1e5', '(1,2)',
  '{0.__class__}', '../../../../etc/passwd', 'R U R\' U\'', 'x' * 3000, '9' * 5000, '\0', '', 'None', 'A=1,B=2',
  '["w,A1,B2"]', "Move disk 1 from Peg 1 to Peg 2",
)  # fmt: skip


@pytest.mark.parametrize('task', sorted(scorers.PLAIN))
def test_a_plain_scorer_runs_no_code(task, tmp_path):
  """A check from outside: the interpreter's audit events cover compiled and run code, and opened files."""
  mark = tmp_path / 'mark'
  dataset, known = entries(task, 3)
  entry = known[0]
  code = _TEXTS[0].replace('MARK', str(mark))
  hostile = [entry, entry | dict(answer=code)]
  hostile += [
    entry | dict(metadata=entry['metadata'] | {field: value})
    for field in entry['metadata']
    for value in (code, [code], {code: code})
  ]
  dataset.score_answer(str(entry['answer']), entry)  # imports its dependencies
  with np.errstate(all='ignore'), _WATCH.on() as records:
    for bad_entry in hostile:
      for text in (*_TEXTS, str(entry['answer'])):
        with contextlib.suppress(Exception):
          dataset.score_answer(text.replace('MARK', str(mark)), bad_entry)
  assert not records
  assert not mark.exists()


@pytest.mark.parametrize('task', sorted(OF_SYMPY))
def test_a_copy_with_sympy_runs_no_code_of_a_completion_or_a_row(task, tmp_path):
  """Runs in this process, where a mark would be visible."""
  mark = tmp_path / 'mark'
  scorer, entry = scorers.safe_scorer(task, {}), gym_attacks.entry_of(task)
  scorers.warm(task)
  assert scorer(entry['answer'], entry) == 1
  rows = gym_attacks.hostile_rows(str(mark))
  pairs = [
    (entry, gym_attacks.filled(text, task, str(mark))) for text in gym_attacks.COMPLETIONS.values()
  ]
  pairs += [pair for name, pair in rows.items() if name.startswith((task, 'row_'))]
  with _WATCH.on() as records:
    for bad_entry, text in pairs:
      with contextlib.suppress(Exception):
        assert scorer(text, bad_entry | dict(answer=bad_entry['answer'])) < 0.1
  # Parsing into a tree is a compile event; running code is another event.
  assert not [event for event in records if event[0] not in ('compile', 'import')]
  assert not mark.exists()
  assert scorer(entry['answer'], entry) == 1


@pytest.mark.parametrize(
  ('parse', 'text', 'value'),
  [
    (safe_eval.literal, "[['_', 'Q'], ['Q', '_']]", [['_', 'Q'], ['Q', '_']]),
    (safe_eval.literal, ' {1: (2.5, -3)} ', {1: (2.5, -3)}),
    (safe_eval.number, '(3 + 4) * 5 - 2/4', Fraction(69, 2)),
    (safe_eval.whole_number, '((0x10 << 0x2) - (0x3 * 0x4))', 52),
    (safe_eval.whole_number, '~5 & 0xff | 1 ^ 2', 251),
  ],
)
def test_parsers_return_the_value(parse, text, value):
  assert parse(text) == value


@pytest.mark.parametrize(
  ('parse', 'text'),
  [
    *[
      (safe_eval.literal, text)
      for text in ('x', '[x]', 'f"{1}"', '[1][0]', '1 if 1 else 2', '', 7, None, b'1')
    ],
    *[
      (safe_eval.number, text)
      for text in ('2^3', 'x', '1j', '9**9**9', 'True', '', 7, '1/0', '٣' * 3 + '+x')
    ],
    *[
      (safe_eval.whole_number, text)
      for text in ('1 << 10**9', '1 << -1', '1.0', 'True', '2**3', '', None)
    ],
    *[
      (safe_eval.algebra, text)
      for text in ('S', 'N', 'Q', 'x.y', 'x[0]', 'f(x)', 'sin(x, y)', 'sin(*x)', "'x'")
    ],
    *[
      (safe_eval.algebra, text)
      for text in ('x**9999', '2**x**9999', 'Integral(x, 2)', 'x ^ 2', 'x // 2', 'oo')
    ],
    *[(safe_eval.symbol, text) for text in ('x y', '__x', 'x' * 30, '𝐱', '', 7, None)],
  ],
)
def test_parsers_raise_only_value_errors(parse, text):
  with pytest.raises(ValueError):
    parse(text)


def bare(monkeypatch) -> None:
  monkeypatch.setattr(
    sandbox,
    'unavailable_reason',
    lambda: 'bwrap is not installed; install it: apt-get install bubblewrap',
  )


@pytest.mark.parametrize('task', sorted(OF_SYMPY))
def test_a_machine_without_a_sandbox_refuses_these_tasks_before_a_model_is_loaded(
  task, monkeypatch
):
  bare(monkeypatch)
  monkeypatch.setattr(models, 'load', lambda *_, **__: pytest.fail('the model was loaded'))
  config = loading.load(
    '', [f'--config.data.tasks=({{"name": "{task}"}},)', '--config.rewards.fn=gym']
  )
  with pytest.raises(
    UserError, match=rf'config.data.tasks.*{task} in a sandbox only.*apt-get install bubblewrap'
  ):
    setup.build_context(config)
  row = row_of(task)
  part = rewards.resolve_parts(dict(fn='gym'))[0]
  with pytest.raises(UserError, match=f'the rows.*{task}'):
    rewards.check_rows([('gym', part.grader)], [row_of('countdown'), row])
  with pytest.raises(sandbox.SandboxError, match='in a sandbox only, and bwrap'):
    verifiers.gym(row.answer, row)


@pytest.mark.parametrize('task', sorted(scorers.EVALUATING.keys() - OF_SYMPY))
def test_a_machine_without_a_sandbox_scores_the_others(task, monkeypatch):
  bare(monkeypatch)
  monkeypatch.setattr(sandboxed, '_server', lambda task: pytest.fail('a sandbox was started'))
  sandboxed.require([task], 'config.data.tasks')
  dataset, known = entries(task, 12)
  row = row_of(task, answer=known[0]['answer'], metadata=known[0]['metadata'])
  assert verifiers.gym(str(known[0]['answer']), row) == 1


def test_unknown_tasks_are_refused():
  with pytest.raises(UserError, match='cannot score composite, whose scorer may evaluate'):
    sandboxed.require(['countdown', 'composite'], 'config.data.tasks')
  with pytest.raises(ValueError, match='no reasoning-gym task with a known scorer'):
    verifiers.gym(
      '1', row_of('countdown')._replace(extra=dict(gym=dict(name='composite'), metadata={}))
    )


@pytest.mark.parametrize('task', ['intermediate_integration', 'simple_integration'])
def test_wrong_and_other_forms_of_integrals_are_scored_as_the_package_scores_them(task):
  dataset, known = entries(task, 12)
  scores = []
  for entry in known[:6]:
    answer = entry['answer']
    forms = (
      f'-({answer})',
      f'({answer}) + 7',
      f'2*({answer})/2',
      answer.replace('2', '3', 1),
      f'{answer} + x',
    )
    for text in forms[: 5 if task == 'simple_integration' else 3]:
      scores.append(scorers.safe_scorer(task, {})(text, entry))
      assert scores[-1] == dataset.score_answer(text, entry), text
  assert {0.0, 1.0} == set(scores)


def test_math_verify_evaluates_only_numbers_and_operators(tmp_path):
  """It passes text that resembles a sum to parse_expr: the code that runs contains no name of the completion."""
  pytest.importorskip('math_verify')
  answer = Row('1', '', (), '5', '', {})
  verifiers.math_verify('\\boxed{5}', answer)
  mark, names = tmp_path / 'mark', set()
  watch = {'on': False}

  def hook(event: str, arguments: tuple) -> None:
    code = arguments[0] if event == 'exec' else None
    if watch['on'] and getattr(code, 'co_filename', '') == '<string>':
      names.update(code.co_names)

  sys.addaudithook(hook)
  watch['on'] = True
  for completion in gym_attacks.COMPLETIONS.values():
    text = completion.replace('MARK', str(mark))
    for form in (
      '{}',
      '\\boxed{{{}}}',
      '$5({})$',
      '\\boxed{{\\text{{{}}}}}',
      '\\boxed{{\\operatorname{{{}}}(1)}}',
    ):
      verifiers.math_verify(form.format(text), answer)
  watch['on'] = False
  assert not mark.exists()
  assert not names & {
    'open',
    'eval',
    'exec',
    'compile',
    '__import__',
    'getattr',
    '__builtins__',
    'system',
    'Path',
    'os',
  }
