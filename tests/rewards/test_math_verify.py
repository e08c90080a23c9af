"""math-verify in workers against math-verify called as its authors mean it, on this process's main thread."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tiers

from jaxrl_llm import rewards
from jaxrl_llm.rewards import ERROR, OK, TIMEOUT
from jaxrl_llm.types import Row, UserError

# (the row's answer, equivalent texts, other texts), where n and m are whole numbers
FORMS = (
  ('{n}', ['The answer is ${n}$.', '\\boxed{{{n}}}', '{n}', '${n}.0$', '$+{n}$'], ['${m}$', '-{n}1', 'no']),
  ('\\frac{{{n}}}{{{m}}}', ['${n}/{m}$', '$\\dfrac{{{n}}}{{{m}}}$', '\\boxed{{\\tfrac{{{n}}}{{{m}}}}}'],
   ['$\\frac{{{m}}}{{{n}}}$', '${n}$']),
  ('{n}/4', ['$\\frac{{{n}}}{{4}}$', '$0.25 \\cdot {n}$', '\\boxed{{{n}/4}}'], ['$4/{n}$', '${n}.4$']),
  ('\\sqrt{{{n}}}', ['$\\sqrt{{{n}}}$', '${n}^{{1/2}}$', '$\\sqrt {{{n}}}$'], ['$\\sqrt{{{m}}}$', '${n}^2$']),
  ('\\{{1, {n}, {m}\\}}', ['$\\{{{m}, {n}, 1\\}}$', '\\boxed{{\\{{{n}, 1, {m}\\}}}}'], ['$\\{{1, {n}\\}}$', '$1$']),
  ('({n}, \\infty)', ['$({n}, \\infty)$', '$({n},+\\infty)$'], ['$[{n}, \\infty)$', '$(-\\infty, {n})$']),
  ('[0, {n}]', ['$[0, {n}]$', '\\boxed{{[0,{n}]}}', '$0 \\le x \\le {n}$'], ['$(0, {n}]$', '$[0, {m}]$']),
  ('{n}\\%', ['${n}\\%$', '\\boxed{{{n}\\%}}', '${n}$'], ['${m}\\%$']),
  ('{n} \\text{{ cm}}', ['${n}$ cm', '${n} \\text{{ cm}}$', '\\boxed{{{n}\\,\\mathrm{{cm}}}}'], ['${m}$ cm']),
  ('x^2 + {n}x', ['$x({n} + x)$', '${n}x + x^2$', '\\boxed{{x^2+{n}x}}'], ['$x^2 - {n}x$', '$x^2$']),
  ('x = {n}', ['$x = {n}$', '${n}$', '$x={n}.0$'], ['$x = {m}$', '$y = {m}$']),
  ('{n},{m}00', ['${n},{m}00$', '{n}{m}00'], ['${n}{m}0$']),
  ('{n} + {m}i', ['${n}+{m}i$', '${m}i + {n}$'], ['${n} - {m}i$']),
  ('\\begin{{pmatrix}} {n} \\\\ {m} \\end{{pmatrix}}', ['$\\begin{{pmatrix}} {n} \\\\ {m} \\end{{pmatrix}}$'],
   ['$\\begin{{pmatrix}} {m} \\\\ {n} \\end{{pmatrix}}$']),
  ('({n}, {m})', ['$({n}, {m})$', '\\boxed{{({n},{m})}}'], ['$({m}, {n})$', '$({n})$']),
  ('{n}\\pi', ['${n}\\pi$', '$\\pi \\cdot {n}$'], ['${n}$', '$\\pi^{n}$']),
)  # fmt: skip


def answers(count: int) -> tuple[list[Row], list[str], list[bool]]:
  """Rows, texts, and whether a text is equivalent to its row's answer."""
  draw, rows, texts, meant = random.Random(0), [], [], []
  for index in range(count):
    answer, same, other = FORMS[index % len(FORMS)]
    n, m = draw.sample((2, 3, 5, 7, 11, 13), 2)  # few: math-verify remembers what it has read
    right = draw.random() < 0.5
    text = draw.choice(same if right else other)
    rows.append(Row(str(index), 'question', (), answer.format(n=n, m=m), 'made', {}))
    texts.append(draw.choice(['', 'So we get ', 'Now $1 + 1 = 2$. ']) + text.format(n=n, m=m))
    meant.append(right)
  return rows, texts, meant


def test_many_answers_score_as_called_directly():
  """With its own time limits, on the main thread, where they work."""
  package = pytest.importorskip('math_verify')
  rows, texts, meant = answers(200 * tiers.REPEATS)
  with rewards.Pool(dict(fn='math_verify', workers=2, deadline_s=60.0, cpu_s=60.0)) as pool:
    scores = pool.score(rows, texts)
  assert (scores.outcome_B == OK).all()
  target = {row.answer: package.parse(f'\\boxed{{{row.answer}}}') for row in rows}
  direct = [
    float(package.verify(target[row.answer], package.parse(text)))
    for row, text in zip(rows, texts, strict=True)
  ]
  assert scores.reward_B.tolist() == direct
  # Not all of one kind, and nearly all as meant: else the lines above would say little.
  assert 0.35 < np.mean(direct) < 0.65 and np.mean(np.array(direct) == meant) > 0.9


def test_time_outs_are_counted_and_nothing_of_the_kind_is_a_wrong_answer():
  """Directly called it takes its own time-out for False."""
  pytest.importorskip('math_verify')
  rows, texts, _ = answers(40)
  texts[3], texts[20] = '$(10^{9})!$', '$9^{9^{9^{9}}}$'
  with rewards.Pool(dict(fn='math_verify', workers=2, cpu_s=1.0, deadline_s=60.0)) as pool:
    scores = pool.score(rows, texts)
  failed = np.flatnonzero(scores.outcome_B != OK)
  assert failed.tolist() == [3, 20] and scores.outcome_B[3] == TIMEOUT
  assert scores.counts['grade/timeouts'] + scores.counts['grade/crashes'] == 2


def test_an_answer_of_the_data_that_cannot_be_read_is_an_error_of_the_row():
  pytest.importorskip('math_verify')
  row = Row('a', 'question', (), '\\text{ }', 'made', {})
  with rewards.Pool(dict(fn='math_verify', workers=1)) as pool:
    scores = pool.score([row, row._replace(answer='7')], ['$7$', '$7$'])
  assert scores.outcome_B.tolist() == [ERROR, OK] and 'cannot be read' in scores.message


def test_without_math_verify_the_extra_is_named(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  for spec in (dict(fn='math_verify'), dict(fn='exact', parts=(dict(fn='math_verify'),))):
    with pytest.raises(UserError, match=r"pip install -e '[^']*\[math\]'"):
      rewards.Pool(spec)
