"""The scorers of reasoning-gym that evaluate text, and copies of these that parse it instead.

Of the scorers of reasoning-gym 0.1.25, eleven pass the completion, or a field of the entry, to `eval` or sympy's
`parse_expr`. They are called through private copies whose globals hold a parser of parsing/safe_eval.py under that
name, so that the package is unchanged and its partial credit applies. The copies run in a sandbox where the machine
has one. Without a sandbox, those that parse into plain numbers and lists run in the worker. sympy is too large to prove
that it never evaluates text, so scorers that pass it expressions are refused there.

The sandbox loads this module, too: it imports only parsing/ of this package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxrl_llm.rewards.parsing import safe_eval

if TYPE_CHECKING:
  from reasoning_gym.dataset import ProceduralDataset

Settings: TypeAlias = Mapping[str, Any]  # of a task's generator, as in config.data.tasks
Entry: TypeAlias = dict[str, Any]  # question, answer and metadata of a reasoning-gym task
Scorer: TypeAlias = Callable[[str, Entry], float]
# Name in the globals of a scorer → its replacement, or the replacements in the globals of that function.
Replacements: TypeAlias = Mapping[str, 'Callable | types.SimpleNamespace | Replacements']

_LITERAL = dict(eval=safe_eval.literal)
_NUMBER = dict(parse_expr=safe_eval.number)

# Task → (its module, the module's class, name in its scorer → replacement in the copy, or a function returning these).
EVALUATING: dict[str, tuple[str, str, Replacements | Callable[[], Replacements]]] = {
  'binary_matrix': ('algorithmic.binary_matrix', 'BinaryMatrix', _LITERAL),
  'bitwise_arithmetic': (
    'arithmetic.bitwise_arithmetic',
    'BitwiseArithmetic',
    dict(verify_solution=dict(eval=safe_eval.whole_number)),
  ),
  'countdown': ('games.countdown', 'Countdown', _NUMBER),
  'intermediate_integration': (
    'algebra.intermediate_integration',
    'IntermediateIntegration',
    lambda: dict(sympy=safe_eval.sympy_names()),
  ),
  'n_queens': ('games.n_queens', 'NQueens', _LITERAL),
  'number_sorting': ('algorithmic.number_sorting', 'NumberSorting', _LITERAL),
  'polynomial_multiplication': (
    'algebra.polynomial_multiplication',
    'PolynomialMultiplication',
    lambda: dict(sp=safe_eval.sympy_names()),
  ),
  'puzzle24': ('games.puzzle24', 'Puzzle24', _NUMBER),
  'simple_integration': (
    'algebra.simple_integration',
    'SimpleIntegration',
    lambda: dict(sympy=safe_eval.sympy_names()),
  ),
  'spiral_matrix': ('algorithmic.spiral_matrix', 'SpiralMatrix', _LITERAL),
  'string_insertion': ('algorithmic.string_insertion', 'StringInsertion', _LITERAL),
}
# Their replacements need sympy; they are refused where there is no sandbox.
SANDBOX_ONLY = frozenset(task for task, (*_, names) in EVALUATING.items() if callable(names))
# Their scorers and helpers were reviewed and evaluate no text. A task in neither table is refused.
PLAIN = frozenset(
  'ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation boxnet '
  'caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio coin_flip color_cube_rotation '
  'complex_arithmetic count_bits count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice '
  'emoji_mystery family_relationships figlet_font fraction_simplification futoshiki game_of_life '
  'game_of_life_halting gcd graph_color group_anagrams gsm_symbolic isomorphic_strings jugs kakurasu knight_swap '
  'knights_knaves largest_island lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle '
  'manipulate_matrix maze mini_sudoku modulo_grid needle_haystack number_filtering number_format number_sequence '
  'palindrome_generation palindrome_partitioning path_star polynomial_equations pool_matrix power_function '
  'prime_factorization products propositional_logic quantum_lock ransom_note rearc rectangle_count rotate_matrix '
  'rotten_oranges rubiks_cube rush_hour self_reference sentence_reordering shortest_path simple_equations '
  'simple_geometry sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo '
  'syllogism time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting '
  'zebra_puzzles'.split()
)
TASKS = PLAIN | EVALUATING.keys()


def package_scorer(task: str, settings: Settings) -> Scorer:
  """The package's scorer of a task of PLAIN, for a generator with these settings."""
  return _dataset(task, json.dumps(settings, sort_keys=True)).score_answer


def safe_scorer(task: str, settings: Settings) -> Scorer:
  """The scorer of a task of EVALUATING, with parsers in place of functions that evaluate text."""
  return _safe_scorer(task, json.dumps(settings, sort_keys=True))


@functools.lru_cache(maxsize=256)
def _dataset(task: str, settings: str) -> ProceduralDataset:
  import reasoning_gym

  return reasoning_gym.create_dataset(task, seed=0, **json.loads(settings))


@functools.lru_cache(maxsize=256)
def _safe_scorer(task: str, settings: str) -> Scorer:
  path, stem, names = EVALUATING[task]
  module = importlib.import_module(f'reasoning_gym.{path}')
  kind, settings_kind = getattr(module, f'{stem}Dataset'), getattr(module, f'{stem}Config')
  # Without the constructor, which may search for all solutions: the scorers of these tasks use only the settings.
  dataset = object.__new__(kind)
  dataset.config = settings_kind(**json.loads(settings))
  copy = _copy(kind.score_answer, names() if callable(names) else names)
  return functools.partial(copy, dataset)


def _copy(function: types.FunctionType, names: Replacements) -> types.FunctionType:
  """A copy of a function with replaced globals; a dict among `names` replaces globals of that function."""
  original = function.__globals__
  changed = {
    name: _copy(original[name], value) if isinstance(value, Mapping) else value
    for name, value in names.items()
  }
  copy = types.FunctionType(
    function.__code__, {**original, **changed}, function.__name__, function.__defaults__
  )
  copy.__kwdefaults__ = function.__kwdefaults__
  return copy


def import_lightly(sympy: bool) -> None:
  """Make single modules of reasoning_gym importable; its `__init__` imports all of them and their dependencies.

  sympy: whether the modules get sympy; only the scorers of SANDBOX_ONLY need it. For the server process only: a smaller
  process forks faster.
  """
  spec = importlib.util.find_spec('reasoning_gym')
  for name in ('', '.algebra', '.algorithmic', '.arithmetic', '.games'):
    package = types.ModuleType(f'reasoning_gym{name}')
    package.__path__ = [
      f'{root}{name.replace(".", "/")}' for root in spec.submodule_search_locations
    ]
    sys.modules[package.__name__] = package
  for name in () if sympy else ('sympy', 'sympy.parsing', 'sympy.parsing.sympy_parser'):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__getattr__ = lambda name: None


@functools.cache
def warm(task: str) -> None:
  """Score known answers once, so that the scorer's imports and caches exist before the first fork."""
  for text, integrand in _INTEGRALS if task in SANDBOX_ONLY else ():
    entry = dict(question='', answer=text, metadata=dict(variable='x', integrand=integrand))
    safe_scorer(task, {})(text, entry)


_INTEGRALS = (
  ('x**3/3 + 2*x**2 - 7*x/5 + C', 'x**2 + 4*x - 7/5'),
  ('-3*exp(2*x)/2 + C', '-3*exp(2*x)'),
  ('sin(2*x - 1)**3/3 + C', '2*sin(2*x - 1)**2*cos(2*x - 1)'),
  ('x*log(x) - x + 5*asin(x) + C', 'log(x) + 5/sqrt(1 - x**2)'),
  ('2*(3*x + 1)**(3/2)/9 + atan(x) + C', 'sqrt(3*x + 1) + 1/(x**2 + 1)'),
  ('x*sin(x) + cos(x) + exp(x)*sin(x)/2 - exp(x)*cos(x)/2', 'x*cos(x) + exp(x)*sin(x)'),
)
