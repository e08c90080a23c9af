"""Hostile completions, and hostile rows of files, for reasoning-gym's tasks.

Code of theirs that ran would create the file MARK.
"""

from __future__ import annotations

import json

from jaxrl_llm.data import row_formats
from jaxrl_llm.types import Row

# Tasks whose scorer passes the completion to eval or parse_expr, then tasks where it passes a field of the row.
OF_COMPLETIONS = (
  *('binary_matrix', 'countdown', 'intermediate_integration', 'n_queens', 'polynomial_multiplication', 'puzzle24'),
  *('simple_integration', 'spiral_matrix', 'string_insertion'),
)  # fmt: skip
# Of these, the ones that a machine without a sandbox refuses.
OF_SYMPY = {'intermediate_integration', 'polynomial_multiplication', 'simple_integration'}
OF_ROWS = 'bitwise_arithmetic', 'number_sorting'
CONFIG = dict(
  binary_matrix='BinaryMatrixConfig', n_queens='NQueensConfig', spiral_matrix='SpiralMatrixConfig',
  string_insertion='StringInsertionConfig', countdown='CountdownConfig', puzzle24='Puzzle24Config',
  simple_integration='SimpleIntegrationConfig', intermediate_integration='IntermediateIntegrationConfig',
  polynomial_multiplication='PolynomialMultiplicationConfig',
)  # fmt: skip

OPEN = "open('MARK', 'w').close()"
HEX = '__import__\\x28"os"\\x29.system\\x28": > MARK"\\x29'
COMPLETIONS = dict(
  plain_call=OPEN,
  dunder_import="__import__('os').system(': > MARK')",
  class_getitem=f"[CONFIG['{HEX}'] for CONFIG.__class_getitem__ in [exec]]",
  class_getitem_of_a_type=f"[c['{HEX}'] for c in [CONFIG] for c.__class_getitem__ in [eval]]",
  replaced_scorer='[0 for DATASET.score_answer in [lambda self, answer, entry: 1.0]]',
  rebound_scorer='[0 for CONFIG.score in [1] for CONFIG.__init_subclass__ in [exec]]',
  rebound_global="[0 for __builtins__['eval'] in [print]]",
  dunder_by_subscript="[__builtins__['__build_class__'] for __builtins__['sorted'] in [__builtins__['exec']]]",
  subclasses="().__class__.__base__.__subclasses__()[0]",
  globals_of_a_method="[CONFIG.validate.__globals__['__builtins__']['open']('MARK', 'w')]",
  getattr_on_builtins="getattr(__builtins__, 'op' + 'en')('MARK', 'w')",
  format_spec="f'{open(\"MARK\", \"w\")!r:>{open(\"MARK\", \"w\").fileno()}}'",
  f_string="f\"{open('MARK', 'w')}\"",
  nested_f_string="f'''{f\"{open('MARK', 'w')}\"}'''",
  str_format="'{0.__class__}'.format(open('MARK', 'w'))",
  walrus="[f := open('MARK', 'w'), f.close()]",
  lambda_call="(lambda: open('MARK', 'w'))()",
  lambda_default="lambda x=open('MARK', 'w'): x",
  list_comprehension="[open('MARK', 'w') for _ in [1]]",
  generator="list(open('MARK', 'w') for _ in '1')",
  map_call="[*map(open, ['MARK'], ['w'])]",
  star_unpacking="[*(open('MARK', 'w'),)]",
  dict_value="{1: open('MARK', 'w')}",
  dict_unpacking="{**{'a': open('MARK', 'w')}}",
  slice_bounds="[1][open('MARK', 'w'):]",
  conditional="[1] if open('MARK', 'w') else [2]",
  boolean="[] or open('MARK', 'w')",
  comparison="1 < len(str(open('MARK', 'w')))",
  yielding="[(yield open('MARK', 'w'))]",
  await_expression="[await open('MARK', 'w')]",
  matrix_product="[1] @ open('MARK', 'w')",
  inner_eval=f'eval("{OPEN}")',
  inner_exec=f'exec("{OPEN}")',
  inner_compile=f'eval(compile("{OPEN}", "x", "exec"))',
  import_library="__import__('pathlib').Path('MARK').touch()",
  homoglyphs="𝔬𝔭𝔢𝔫('MARK', 'w')",
  fullwidth="ｅｖａｌ('open(\"MARK\", \"w\")')",
  fullwidth_dunder="＿＿import＿＿('os').system(': > MARK')",
  escaped_name="\\u006fpen('MARK', 'w')",
  octal_escapes="eval('\\157\\160\\145\\156\\50\"MARK\",\"w\"\\51')",
  raw_bytes="eval(b'open(\"MARK\", \"w\")')",
  null_byte="[1]\0; open('MARK', 'w')",
  line_break="[1]\nopen('MARK', 'w')",
  form_feed="[1]\x0c\nopen('MARK', 'w')",
  semicolon="1; open('MARK', 'w')",
  comment="[1] # )\n+ open('MARK', 'w')",
  continuation="[1] + \\\nopen('MARK', 'w')",
  encoding_line="# -*- coding: unicode_escape -*-\n\\157pen('MARK', 'w')",
  sympy_method="x.func(open('MARK', 'w'))",
  sympy_lambdify="lambdify(x, 'open(\"MARK\", \"w\")')",
  sympy_sympify="sympify('open(\"MARK\", \"w\")')",
  sympy_string="S('open(\"MARK\", \"w\")')",
  sympy_symbols="symbols('x', cls=lambda *a, **k: open('MARK', 'w'))",
  sympy_function="Function('f')(open('MARK', 'w'))",
  sympy_lambda_notation="lambda x: open('MARK', 'w')",
  sympy_factorial="(open('MARK', 'w'))!",
  sympy_keyword="sin(x, evaluate=open('MARK', 'w'))",
  sympy_repeated_decimal="0.2[open('MARK', 'w')]",
  sympy_integral="Integral(x, open('MARK', 'w'))",
  sympy_preview="preview(x, viewer='file', filename='MARK')",
  sympy_text_argument="sin('open(\"MARK\", \"w\")')",
  sympy_comparison="x == 'open(\"MARK\", \"w\")'",
  nested_quotes="\"'\" + '\"' + open('MARK', 'w').name",
  starred_assignment="[x for x, in [[open('MARK', 'w')]]]",
)  # fmt: skip
# Expressions that need much time or memory where they are computed.
HEAVY = dict(
  power_tower='9**9**9',
  power_tower_of_floats='1e9**1e9**9',
  symbol_tower='x**9**9**9',
  sum_to_a_power='(x + 2)**999999999',
  negative_tower='2**-(9**9**9)',
  shift='1 << 99999999999',
  repeated_list='[0] * 99999999999',
  repeated_text="'x' * 99999999999",
  giant_number='9' * 5000,
  giant_hexadecimal='0x' + 'f' * 200_000,
  giant_exponent='1e999999999999',
  giant_literal='[' + '1,' * 400_000 + ']',
  deep_brackets='[' * 5000 + ']' * 5000,
  deep_parentheses='(' * 5000 + '1' + ')' * 5000,
  deep_signs='-' * 50_000 + '1',
  deep_powers='2**' * 3000 + '1',
  long_sum='1+' * 40_000 + '1',
  exponential_of_exponential='exp(' * 60 + '99' + ')' * 60,
)  # fmt: skip


def entry_of(task: str, index: int = 0) -> dict:
  import reasoning_gym

  return reasoning_gym.create_dataset(task, seed=1, size=4)[index]


def row_of(task: str, index: int = 0, **changes) -> Row:
  entry = entry_of(task, index) | changes
  gym = dict(name=task, settings={}, answer=entry['answer'])
  extra = dict(gym=gym, metadata=entry['metadata'])
  return Row(f'{task}-{index}', entry['question'], (), str(entry['answer']), 'gym', extra)


def read(line: dict) -> Row:
  """A row as it is read from a line of a JSONL file."""
  return row_formats.to_row(json.loads(json.dumps(line)), 'line 1', {}, 'a file')


def hostile_rows(mark: str) -> dict[str, tuple[dict, str]]:
  """name → a row of a file, and a completion that makes its scorer use the field."""
  code = f"__import__('os').system(': > {mark}')"
  rows = {}
  for task in (*OF_COMPLETIONS, *OF_ROWS):
    entry = entry_of(task)
    completion = json.dumps([1.0]) if task == 'number_sorting' else '1'
    rows[f'{task}_answer'] = (entry | dict(answer=code), completion)
    for field in entry['metadata'].keys() - {'source_dataset'}:
      for kind, hostile in dict(text=code, list=[code], dict={code: code}, number=10**4000).items():
        metadata = entry['metadata'] | {field: hostile}
        rows[f'{task}_{field}_{kind}'] = (entry | dict(metadata=metadata), str(entry['answer']))
    rows[f'{task}_no_metadata'] = (entry | dict(metadata=dict(source_dataset=task)), completion)
  sorting = dict(source_dataset='number_sorting', direction='ascending')
  rows['as_in_a_file'] = (
    dict(question='q', answer=code, metadata=dict(source_dataset='number_sorting')),
    '[1]',
  )
  rows['comprehension'] = (
    dict(question='q', answer=f'[{code} for _ in [1]]', metadata=sorting),
    '[1]',
  )
  for name, text in (
    ('integrand', code),
    ('variable', code),
    ('variable_expression', 'x) + ' + code),
  ):
    metadata = dict(source_dataset='simple_integration', variable='x', integrand='2*x')
    metadata[name.partition('_')[0]] = text
    rows[f'row_{name}'] = (dict(question='q', answer='x**2', metadata=metadata), 'x**2 + C')
  problem = dict(source_dataset='bitwise_arithmetic', problem=code)
  rows['problem'] = (dict(question='q', answer='0', metadata=problem), '0')
  gym = dict(name='number_sorting', settings={}, answer=code)
  rows['own_gym_column'] = (
    dict(question='q', answer='[1]', metadata=dict(direction='ascending'), gym=gym), '[1]',
  )  # fmt: skip
  return rows


def filled(completion: str, task: str, mark: str) -> str:
  """An item of COMPLETIONS for a task."""
  text = completion.replace('MARK', mark).replace('CONFIG', CONFIG[task])
  return text.replace('DATASET', CONFIG[task].replace('Config', 'Dataset'))
