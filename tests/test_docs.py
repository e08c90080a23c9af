"""Public functions of the method stages have docstrings, and a paper is named by its arXiv number."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
STAGES = ('objective', 'rollout', 'curriculum')

# A 'Source' names papers, or states that the functions chosen name them.
SOURCE = re.compile(r'Source:\s+(by\s+the\s+functions\s+chosen\b|.*?arXiv:\d{4}\.\d{4,5}\b)', re.S)
ARXIV = re.compile(r'\barXiv\b(?!:\d{4}\.\d{4,5}\b)', re.I)


def faults(source: str, name: str) -> list[str]:
  """One sentence for each public top-level function of a module with a poor docstring."""
  found = []
  for node in ast.parse(source, name).body:
    if not isinstance(node, ast.FunctionDef) or node.name.startswith('_'):
      continue
    where, doc = f'{name}:{node.lineno} {node.name}', ast.get_docstring(node)
    if not doc:
      found.append(f'{where} has no docstring.')
    elif 'Source' in doc and not SOURCE.search(doc):
      found.append(f"{where} has a source without 'arXiv:NNNN.NNNNN'.")
    elif ARXIV.search(doc):
      found.append(f"{where} names a paper in another way than 'arXiv:NNNN.NNNNN'.")
  return found


def modules() -> list[pathlib.Path]:
  return sorted(p for stage in STAGES for p in (ROOT / 'jaxrl_llm' / stage).glob('**/*.py'))


def test_the_stages_are_where_this_test_looks():
  assert {'objective', 'rollout'} <= {path.parent.name for path in modules()}


@pytest.mark.parametrize('path', modules(), ids=lambda p: f'{p.parent.name}/{p.stem}')
def test_every_public_function_is_documented(path):
  assert faults(path.read_text(), str(path.relative_to(ROOT))) == []


@pytest.mark.parametrize(
  'doc, why',
  [
    (None, 'no docstring'),
    ('"""A = R. Source: the paper."""', 'a source without'),
    ('"""A = R. Source: nonesuch."""', 'a source without'),
    ('"""A = R. Source: arXiv:2402."""', 'a source without'),
    ('"""A = R. Source: none."""', 'a source without'),
    ('"""A = R. See arxiv 2402.03300."""', 'another way'),
  ],
)
def test_a_planted_fault_is_found(doc, why):
  (found,) = faults(f'def f(x):\n  {doc or "pass"}\n', 'm.py')
  assert 'm.py:1 f' in found and why in found


@pytest.mark.parametrize(
  'doc',
  [
    'A = R.',
    'A = R as in arXiv:2402.03300.',
    'A = R.\n\n  Source: arXiv:2402.03300 (GRPO, eq. 3).',
    'A = R. Source: PPO,\n  arXiv:1707.06347.',
    'A = R. Source: by the\n  functions chosen.',
  ],
)
def test_a_good_docstring_is_no_fault(doc):
  assert faults(f'def f(x):\n  """{doc}"""\ndef _g(x):\n  pass\n', 'm.py') == []
