"""Puzzles, each solved independently from the text of its question."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import re
import string
from fractions import Fraction

import pytest

from jaxrl_llm import data as package
from jaxrl_llm.config import loading as configs
from jaxrl_llm.data import composed, sources
from jaxrl_llm.environments import discussion, tools
from jaxrl_llm.models import tokenizer
from jaxrl_llm.rewards import verifiers
from jaxrl_llm.types import UserError


def rows(*listed, held_out=10, size=60, seed=0):
  data = configs.default().data
  data.source, data.size, data.seed, data.tasks = 'puzzles', size, seed, listed
  return sources.puzzles(data, held_out)


KINDS = ('compose', 'countdown', 'discussed', 'keychain', 'products')


@pytest.mark.parametrize('name', KINDS)
def test_the_same_every_time_and_none_in_both_sets(name):
  # Of few digits, a hundred rows of another seed repeat some.
  long = dict(products=dict(max_digits=6, min_digits=6), discussed=dict(max_length=9, min_length=9))
  task = dict(name=name) | long.get(name, {})
  train, held_out = rows(task)
  assert (train, held_out) == rows(task)
  questions = [row.question for row in train + held_out]
  assert len(set(questions)) == len(questions) == 70
  assert {row.source for row in train + held_out} == {f'puzzles/{name}'}
  assert not {row.question for row in rows(task, seed=1)[0]} & set(questions)


# Of nine rows each. Another one means that a run cannot go on with the rows it began with: change it on purpose alone.
GOLDEN = dict(
  compose='384e7202a1a5f1a2',
  countdown='da931adcca5cf6ec',
  discussed='501d6a5a712f9b89',
  keychain='8b23d9b7a6849d36',
  products='c1efd1635ae26f99',
)


@pytest.mark.parametrize('name', KINDS)
def test_every_process_draws_the_same(name):
  """String hashes differ between processes, so that no row may depend on the order of a set."""
  rows_drawn = [[row.id, row.extra] for row in rows(dict(name=name), size=9, held_out=0)[0]]
  assert hashlib.sha256(json.dumps(rows_drawn).encode()).hexdigest()[:16] == GOLDEN[name]


# Letter by letter, where composed.py has slices and tables.
LETTERS = string.ascii_lowercase
PLAIN = dict(
  f0=lambda x: ''.join(reversed(x)),
  f1=lambda x: ''.join(c * x.count(c) for c in LETTERS),
  f2=lambda x: ''.join(x[(i + 1) % len(x)] for i in range(len(x))),
  f3=lambda x: ''.join(x[i - 1] for i in range(len(x))),
  f4=lambda x: ''.join(LETTERS[(LETTERS.index(c) + 1) % 26] for c in x),
  f5=lambda x: ''.join(LETTERS[LETTERS.index(c) - 1] for c in x),
  f6=lambda x: ''.join(LETTERS[25 - LETTERS.index(c)] for c in x),
  f7=lambda x: ''.join(c for c in x for _ in range(2)),
  f8=lambda x: ''.join([*x, *reversed(x)]),
  f9=lambda x: ''.join(x[i ^ 1] if i ^ 1 < len(x) else c for i, c in enumerate(x)),
  f10=lambda x: ''.join(x[i] for i in sorted(range(len(x)), key=lambda i: (i % 2, i))),
  f11=lambda x: x + next(iter(x)),
)


def test_compositions_are_worked_out_from_within():
  train, held_out = rows(dict(name='compose', max_depth=4), size=400)
  for row in train + held_out:
    names, value = re.fullmatch(r'((?:f\d+\()+)([a-z]+)\)+=', row.question).groups()
    names = names.rstrip('(').split('(')
    traits = row.extra
    assert (traits['depth'], traits['length'], traits['functions']) == (
      len(names),
      len(value),
      names,
    )
    for name in reversed(names):
      value = PLAIN[name](value)
    assert row.answer == value
  assert {row.extra['depth'] for row in train} == {1, 2, 3, 4}
  assert {row.extra['length'] for row in train} == {2, 3, 4, 5}
  assert {name for row in train for name in row.extra['functions']} == set(PLAIN)


def test_functions_are_different_and_told():
  words = [''.join(w) for n in (1, 2, 3) for w in itertools.product('abz', repeat=n)]
  found = {name: tuple(map(fn, words)) for name, (fn, _) in composed.FUNCTIONS.items()}
  assert len(set(found.values())) == len(found) and all(all(said) for said in found.values())
  (row,), _ = rows(dict(name='compose', min_depth=2, tell=1), size=1, held_out=0)
  *lines, call = row.question.splitlines()
  want = {f'{n}(x): {composed.FUNCTIONS[n][1]}.' for n in row.extra['functions']}
  assert set(lines) == want and call.endswith('=')


def test_compositions_share_evidence_by_their_difficulty():
  train, _ = rows(dict(name='compose'), size=200)
  kind = package.kinds(train)
  want = {(row.extra['depth'], row.extra['length']): k for row, k in zip(train, kind, strict=True)}
  assert len(want) == len(set(kind)) == 8


def reachable(numbers: tuple) -> set[Fraction]:
  """All values that can be made of all numbers."""
  if len(numbers) == 1:
    return {numbers[0]}
  found = set()
  for i, j in itertools.permutations(range(len(numbers)), 2):
    a, b = numbers[i], numbers[j]
    rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
    for made in (a + b, a - b, a * b, *((a / b,) if b else ())):
      found |= reachable((*rest, made))
  return found


def test_countdowns_can_be_solved_and_are_by_their_answer():
  train, held_out = rows(dict(name='countdown', max_numbers=5), size=80)
  for row in train + held_out:
    target, numbers = re.fullmatch(r'make (\d+) of ([\d ]+):', row.question).groups()
    numbers = [int(n) for n in numbers.split()]
    traits = row.extra
    assert (traits['target'], traits['numbers'], traits['count']) == (
      int(target),
      numbers,
      len(numbers),
    )
    assert 1 <= int(target) <= 99 and all(1 <= n <= 9 for n in numbers)
    assert collections.Counter(re.findall(r'\d+', row.answer)) == collections.Counter(
      map(str, numbers)
    )
    assert verifiers.countdown(row.answer, row) == 1
    if len(numbers) == 3:
      assert Fraction(int(target)) in reachable(tuple(map(Fraction, numbers)))
  assert {row.extra['count'] for row in train} == {3, 4, 5}
  assert {sign for row in train for sign in row.answer} >= set('+-*/()')


def follow(text: str) -> tuple[str, int]:
  """Returns the question at the end of the chain, and the number of links."""
  pairs = dict(re.findall(r'\{"([0-9a-f-]+)": "([^"]+)"\}', text))
  key, links = re.search(r'Start with the key ([0-9a-f-]+)\.', text)[1], 0
  while key in pairs:
    key, links = pairs[key], links + 1
  return key, links


@pytest.mark.parametrize('letters', [0, 3])
def test_key_chains_lead_to_a_question_that_the_text_answers(letters):
  train, held_out = rows(dict(name='keychain', max_hops=3, key_letters=letters), size=60)
  for row in train + held_out:
    text, traits = row.question, row.extra
    question, links = follow(text)
    facts = {(w, t): int(n) for w, n, t in re.findall(r'([A-Z][a-z]+) has (\d+) ([a-z]+)\.', text)}
    single = [(w, t) for t, w in re.findall(r'How many (\w+) does (\w+) have\?', question)]
    several = [(w, t) for t, w in re.findall(r'the (\w+) of (\w+)', question)]
    assert len(facts) == len(set(facts.values())) == 8 and bool(single) != bool(several)
    assert row.answer == str(sum(facts[owner] for owner in single + several))
    assert (traits['links'], traits['hops']) == (links, len(single + several))
    assert traits['pairs'] == text.count('": "') == 3 * links
    # Three questions are in the text, and the others have other answers.
    ends = re.findall(r'": "(How many[^"]+)"', text)
    others = [e for e in ends if e != question]
    assert len(ends) == 3 and len(others) == 2
    for other in others:
      owners = [(w, t) for t, w in re.findall(r'the (\w+) of (\w+)', other)]
      owners += [(w, t) for t, w in re.findall(r'How many (\w+) does (\w+) have\?', other)]
      assert str(sum(facts[owner] for owner in owners)) != row.answer
    assert traits['words'] == len(text.split())
  assert {row.extra['links'] for row in train} == {2, 3, 4}
  assert {row.extra['hops'] for row in train} == {1, 2, 3}


def test_a_products_demonstration_is_an_episode_with_the_calculator():
  train, held_out = rows(dict(name='products', max_digits=3, calls=30), size=400)
  calculator = tools.calculator(tag='c')
  called = 0
  for row in train + held_out:
    left, right = re.fullmatch(r'(\d+)\*(\d+)=', row.question).groups()
    assert len(left) == len(right) == row.extra['digits']
    assert (
      int(row.answer) == sum([int(left)] * int(right)) and verifiers.number(row.answer, row) == 1
    )
    solution = row.extra['solution']
    first, mark, rest = solution.partition('</c>')
    if mark:  # the call, its observation, and the turn that is graded
      observed = calculator.step(first + mark)
      assert not observed.done and rest.startswith(observed.observation)
      solution = rest.removeprefix(observed.observation)
      called += 1
    answered = calculator.step(solution)
    assert answered.done and verifiers.number(solution, row) == 1
  assert 0.2 < called / 410 < 0.4 and {row.extra['digits'] for row in train} == {2, 3}


@pytest.mark.parametrize('right, judged', [(50, 100), (100, 0), (0, 50)])
def test_a_discussed_demonstration_is_an_episode_with_a_true_score(right, judged):
  train, held_out = rows(dict(name='discussed', right=right, judged=judged), size=400)
  encoder = tokenizer.characters(''.join(sorted(set('0123456789revokn:=?!<score>/'))))
  good = true = 0
  for row in train + held_out:
    assert row.answer == row.question[4:-1][::-1] and len(row.answer) == row.extra['length']
    ids = [*encoder.encode(row.extra['solution']), *encoder.end_ids]
    *turns, rest = ''.join('|' if i in encoder.end_ids else encoder.decode([i]) for i in ids).split(
      '|'
    )
    environment, shown = discussion.discussion(evaluate='?', score='!'), ''
    environment.reset(row, 0)
    texts, results = [], []
    for turn in turns:
      assert turn.startswith(shown)
      texts.append(turn.removeprefix(shown))
      results.append(environment.step(texts[-1]))
      shown = results[-1].observation
    solved = texts[0] == row.answer
    assert results[2] == (None, (1.0, 0.0, 0.0) if solved else (0.0, 1.0, 0.0), True) and not rest
    assert texts[0] in (row.answer, row.answer[::-1]) and texts[1] in ('ok', 'no')
    good, true = good + solved, true + (solved == (texts[1] == 'ok'))
  assert abs(good / 410 - right / 100) < 0.08
  assert abs(true / 410 - (1 + judged / 100) / 2) < 0.08


@pytest.mark.parametrize(
  'task, message',
  [
    (dict(name='composed'), 'did you mean compose'),
    (dict(name='compose', max_depht=3), 'max_depht is no setting'),
    (dict(name='compose', min_depth=3), 'min_depth=3 is above max_depth=2'),
    (dict(name='countdown', min_numbers=1), 'min_numbers=1 must be a whole number of at least 2'),
    (dict(name='countdown', min_number=50, max_number=60, max_target=1, max_numbers=3), 'up to 1'),
    (dict(name='keychain', facts=99), 'facts=99 must be from max_hops=2 to 98'),
    (dict(name='keychain', key_letters=1), 'key_letters=1 are too few for'),
    (dict(name='products', calls=101), 'calls=101 is a percentage'),
    (dict(name='discussed', right=101), 'right=101 is a percentage'),
    (dict(name='discussed', judged=-1), 'judged=-1 must be a whole number of at least 0'),
  ],
)
def test_what_cannot_be_made_is_one_sentence(task, message):
  with pytest.raises(UserError, match=r'config\.data\.tasks\[0\]') as error:
    rows(task)
  assert message in str(error.value)
