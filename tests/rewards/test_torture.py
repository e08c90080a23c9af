"""Texts that attack graders: each has an outcome, and none changes the score of another."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import CRASH, ERROR, OK, TIMEOUT
from jaxrl_llm.types import Row

MB = 10**6
BAD, NO_TIME = 0.0, 'no time'  # results of math-verify for a text

# None of them gives the answer 7. Second column: the result of math-verify, None where both are possible.
ATTACKS = {
  'catastrophic regex': ('a' * 60 + '!', BAD),
  'ten megabytes of letters': ('a' * 10 * MB, None),
  'ten megabytes of digits': ('9' * 10 * MB, None),
  'ten megabytes of numbers': ('1 ' * 5 * MB, None),
  'ten megabytes of groups of three': ('1' + ',111' * (5 * MB // 2) + 'x', None),
  'ten megabytes of signs': ('-' * 10 * MB, None),
  'ten megabytes of points': ('1.' * 5 * MB, None),
  'ten megabytes of tags': ('<answer>' * MB + '</answer>' * 2, None),
  'ten megabytes of space': (' ' * 10 * MB, None),
  'NULs': ('\0' * 1000, BAD),
  'lone surrogates': ('\ud800\udfff\ud800 4', BAD),
  'other digits': ('\u0667 \uff17 \u2466 \U0001d7d5', None),
  'stacked diacritics': ('8' + '\u0301' * 5000, None),
  'right to left': ('\u202e5\u202c 4', BAD),
  'boxes in boxes, open': ('\\boxed{' * 5000, BAD),
  'boxes in boxes': ('\\boxed{' * 5000 + '5' + '}' * 5000, BAD),
  'many boxes': ('\\boxed{5} ' * 2000, None),
  'nested fractions': ('$' + '\\frac{' * 60 + '1' + '}{2}' * 60 + '$', NO_TIME),
  'nested braces': ('$' + '{' * 500 + '1' + '}' * 500 + '$', None),
  'nested brackets': ('$' + '(' * 300 + '1' + ')' * 300 + '$', None),
  'an integer of a million digits': ('9' * MB, None),
  'an exponent': ('1e999999999', BAD),
  'an exponent in LaTeX': ('$10^{999999999}$', NO_TIME),
  'a tower': ('$9^{9^{9^{9}}}$', NO_TIME),
  'a factorial': ('$(10^{8})!$', NO_TIME),
  'a binomial': ('$\\binom{10^9}{10^8}$', NO_TIME),
  'a small power': ('$2^{-10^{10}}$', NO_TIME),
  'a long sum': ('1+' * 5000 + '1', BAD),
  'a tower of x': ('$' + 'x^' * 300 + 'x$', None),
  'a format': ('{0.__class__.__mro__} %s %n', BAD),
  'code': ("__import__('os').kill(0, 9)", BAD),
  'backslashes': ('\\' * 100_000, BAD),
  'dollars': ('$' * 100_000, None),
}  # fmt: skip
INLINE = (
  'exact',
  'number',
  'first_number',
  'short_answer',
  'bare_number',
  'tagged',
  'numeric',
  'multiple_choice',
)
ROW = Row('id', 'question', (), '7', 'source', {})


def interleaved(rows, texts, right, wrong):
  """Each text between a right completion and a wrong one, each with its own row."""
  all_rows = [row for row in rows for _ in range(3)]
  return all_rows, [text for attack in texts for text in (right, attack, wrong)]


@pytest.mark.parametrize('name', INLINE)
def test_graders_without_a_worker_never_raise_and_score_every_attack(name):
  """They run in the trainer's process: time that is not linear in these texts would hang it."""
  right, wrong = {'tagged': ('<answer>7</answer>', 'seven'), 'bare_number': ('7', 'seven')}.get(
    name, ('7', '8')
  )
  texts = [text for text, _ in ATTACKS.values()]
  row = ROW
  if name == 'multiple_choice':
    row, right, wrong = ROW._replace(answer='G'), 'The answer is G', 'The answer is H'
  with rewards.Pool(dict(fn=name)) as pool:
    scores = pool.score(*interleaved([row] * len(texts), texts, right, wrong))
    assert pool._processes.newest is None
  assert (scores.outcome_B == OK).all()
  assert (scores.reward_B[0::3] == 1).all() and (scores.reward_B[2::3] == 0).all()
  one_number = {'ten megabytes of digits', 'an integer of a million digits'}
  want = [float(name == 'bare_number' and attack in one_number) for attack in ATTACKS]
  assert scores.reward_B[1::3].tolist() == want


@pytest.mark.parametrize('name', ['exact', 'number', 'tagged'])
def test_answers_of_the_data_may_be_hostile(name):
  """A row whose answer a grader cannot compare with is an error of that row."""
  rows = [ROW._replace(answer=text) for text, _ in ATTACKS.values()]
  with rewards.Pool(dict(fn=name)) as pool:
    scores = pool.score(rows, ['7'] * len(rows))
  assert set(scores.outcome_B.tolist()) <= {OK, ERROR} and len(scores.message) <= 200
  assert not scores.reward_B.any()


def test_math_verify_is_stopped_at_its_time_limit_and_its_neighbors_are_right():
  pytest.importorskip('math_verify')
  # One of the longest texts is enough: each costs the complete time limit.
  attacks = {k: v for k, v in ATTACKS.items() if len(v[0]) < 5 * MB or k.endswith('of numbers')}
  texts = [text for text, _ in attacks.values()]
  # Limited by processor time, so that a busy machine causes no time-out.
  spec = dict(fn='math_verify', workers=2, cpu_s=1.0, deadline_s=120.0)
  with rewards.Pool(spec) as pool:
    scores = pool.score(*interleaved([ROW] * len(texts), texts, 'so $\\frac{14}{2}$', '$8$'))
  assert (scores.outcome_B[0::3] == OK).all() and (scores.outcome_B[2::3] == OK).all()
  assert (scores.reward_B[0::3] == 1).all() and (scores.reward_B[2::3] == 0).all()
  assert not scores.reward_B[1::3].any()
  for (name, (_, want)), outcome in zip(attacks.items(), scores.outcome_B[1::3], strict=True):
    allowed = {BAD: (OK,), NO_TIME: (TIMEOUT, CRASH), None: (OK, TIMEOUT, CRASH)}[want]
    assert outcome in allowed, (name, outcome)
  assert scores.counts['grade/timeouts'] >= 4 and scores.counts['grade/errors'] == 0


OWN = r"""
import fractions, json, os, re, signal

def judge(data_source, solution_str, ground_truth, extra_info=None):
  text = solution_str
  if text.startswith('hang'): (10 ** 10 ** 9) % 7
  if text.startswith('regex'): re.match(r'(a+)+$', 'a' * 60 + 'b')
  if text.startswith('die'): os.kill(os.getpid(), signal.SIGKILL)
  if text.startswith('hog'): return len(list(range(10 ** 9)))
  if text.startswith('int'): int(text[3:])
  if text.startswith('json'): json.loads(text[4:])
  return float(text == ground_truth)
"""
PIECES = (
  *('7', '-', '.', ',', '1e999', '\0', '\ud800', '\\boxed{', '}', '$', '\\frac', '(', 'a' * 50),
  *('\u0667', '\u202e', '\n', '%s', '{0}', '<answer>', '</answer>', '9' * 500, '[' * 99),
)


def adversarial(count: int) -> tuple[list[str], dict[str, list[int]]]:
  """(texts of bad pieces with 7 among them, failure → the indices of texts that cause it in the grader above)."""
  draw = random.Random(0)
  texts = [''.join(draw.choices(PIECES, k=draw.randrange(12))) for _ in range(count)]
  texts[::10] = ['7'] * len(texts[::10])
  places = draw.sample(range(count), 66)
  kinds = dict(hang=places[:4], regex=places[4:8], die=places[8:16], hog=places[16:18])
  kinds |= dict(int=places[18:42], json=places[42:])
  for kind, at in kinds.items():
    for b in at:
      text = {'int': '9' * 10**5, 'json': '[' * 10**5}.get(kind, texts[b])
      texts[b] = f'{kind}{text}'
  return texts, kinds


def test_ten_thousand_adversarial_strings(tmp_path, monkeypatch):
  (tmp_path / 'own_torture.py').write_text(OWN)
  monkeypatch.syspath_prepend(str(tmp_path))
  texts, kinds = adversarial(10_000)
  spec = dict(fn='own_torture:judge', workers=2, cpu_s=0.5, deadline_s=60.0, memory_mb=512)
  with rewards.Pool(spec) as pool:
    scores = pool.score([ROW] * len(texts), texts)
  want_B = np.full(len(texts), OK)
  outcomes = dict(hang=TIMEOUT, regex=TIMEOUT, die=CRASH, hog=CRASH, int=ERROR, json=ERROR)
  for kind, at in kinds.items():
    want_B[at] = outcomes[kind]
  np.testing.assert_array_equal(scores.outcome_B, want_B)
  right_B = np.array([text == '7' for text in texts], np.float32)
  assert right_B.sum() > 900
  np.testing.assert_array_equal(scores.reward_B, right_B)
  assert list(scores.counts.values()) == [8, 10, 48]


@pytest.mark.parametrize('name', INLINE)
def test_ten_thousand_adversarial_strings_without_a_worker(name):
  texts, _ = adversarial(10_000)
  row = ROW._replace(answer='A') if name == 'multiple_choice' else ROW
  with rewards.Pool(dict(fn=name)) as pool:
    scores = pool.score([row] * len(texts), texts)
  assert (scores.outcome_B == OK).all() and set(scores.reward_B.tolist()) <= {0.0, 1.0}
  if name == 'exact':
    assert scores.reward_B.tolist() == [float(text.strip() == '7') for text in texts]
