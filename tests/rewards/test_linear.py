"""The time of graders that run without a deadline is linear in the length of the completion."""

from __future__ import annotations

import functools
import time

import pytest

from jaxrl_llm.rewards import format_rules, verifiers
from jaxrl_llm.rewards.parsing import answer_span
from jaxrl_llm.types import Row

SHAPES = (
  *('<answer>', '</answer>', '<answer></answer>', '<think>', '<think></think>', '< answer>'),
  *('```python\n', '```\n', '```\na\n', '``` ', '``', '\n```', '\n ``` a`', '\t```\n'),
  *('\\boxed{', '\\boxed', '\\boxed ', '}', '{', '\\text{', '\\text{a', '\\left', '$', '\\'),
  *('**A', '**', '__', '`A', 'A) ', '(A', 'A)\n', 'answer is ', 'answer to ', 'option A ', '#### '),
  *('1', '1,', '1.', '1,111', '-', '- ', '1/', '\\frac{', '10^', '1e', '1%', '1 ', '.', '1\u2009'),
  *(' ', '\n', '\t', '\r', 'a', '\N{MINUS SIGN}', '(', '((1+', '1+1\n', ':', '=\n'),
)
ROW = Row('id', 'question', (), '7', 'source', {})
CHOICE = ROW._replace(answer='A', extra=dict(options=['Paris', 'Rome']))
GAME = ROW._replace(extra=dict(numbers=[1, 2], target=3))
FUNCTIONS = dict(
  exact=functools.partial(verifiers.exact, row=ROW),
  number=functools.partial(verifiers.number, row=ROW),
  first_number=functools.partial(verifiers.first_number, row=ROW),
  short_answer=functools.partial(verifiers.short_answer, row=ROW),
  short_answer_in_words=functools.partial(verifiers.short_answer, row=ROW._replace(answer='red')),
  marked_number=functools.partial(verifiers.marked_number, row=ROW),
  bare_number=functools.partial(verifiers.bare_number, row=ROW),
  tagged=functools.partial(verifiers.tagged, row=ROW),
  numeric=functools.partial(verifiers.numeric, row=ROW),
  numeric_in_tags=functools.partial(verifiers.numeric, row=ROW, tag='answer'),
  multiple_choice=functools.partial(verifiers.multiple_choice, row=CHOICE),
  multiple_choice_in_tags=functools.partial(verifiers.multiple_choice, row=CHOICE, tag='answer'),
  countdown=functools.partial(verifiers.countdown, row=GAME),
  countdown_in_tags=functools.partial(verifiers.countdown, row=GAME, tag='answer'),
  tags=functools.partial(format_rules.tags, row=ROW),
  share_of_tags=functools.partial(format_rules.tags, row=ROW, share=True),
  repetition=functools.partial(format_rules.repetition, row=ROW),
  fences=answer_span.fences,
  boxed=answer_span.boxed,
  in_tag=functools.partial(answer_span.in_tag, tag='answer'),
)
CHARS, TIMES = 1500, 16
# Linear growth is TIMES, quadratic TIMES ** 2. The limit lies between, because caches and other processes disturb it.
MAX_GROWTH = 5 * TIMES
LEAST_S = 1e-4  # for the shorter text: below it the measurement is the fixed cost of a call


def cost(function, text: str) -> float:
  """CPU seconds of this thread, the best of three calls."""
  times = []
  for _ in range(3):
    begin = time.thread_time()
    function(text)
    times.append(time.thread_time() - begin)
    if times[-1] > 0.2:
      break
  return min(times)


def growth(function, shape: str, end: str) -> float:
  """The ratio of costs of a text TIMES as long and a short one."""
  short, long = (shape * (chars // len(shape)) + end for chars in (CHARS, CHARS * TIMES))
  return cost(function, long) / max(cost(function, short), LEAST_S)


@pytest.mark.parametrize('name', FUNCTIONS)
def test_time_grows_with_the_length_of_the_text(name):
  function = FUNCTIONS[name]
  for shape in SHAPES:
    for end in ('', '7', '!'):
      if (ratio := growth(function, shape, end)) > MAX_GROWTH:
        ratio = min(
          ratio, growth(function, shape, end)
        )  # a busy machine disturbs single measurements
      assert ratio <= MAX_GROWTH, (name, shape, end, ratio)


@pytest.mark.parametrize('name', ['number', 'numeric'])
@pytest.mark.parametrize(
  'text',
  [
    '\\boxed{5 %s!}',
    '\\boxed{%s5!}',
    '5 or %s!',
    '#### 5 or %s6',
    '6 or %s5',
    'The answer is not %s5',
  ],
)
@pytest.mark.parametrize('word', ['a', 'also', 'm^2', ' it', '$ ', 'it is ', 'x =', '}', '°'])
def test_the_context_of_a_number_is_read_once(name, text, word):
  """A pattern with two ways to match each word takes 2 ** 20 times as long for 20 more words."""
  short, long = (cost(FUNCTIONS[name], text % (word * count)) for count in (4, 24))
  assert long <= MAX_GROWTH * max(short, LEAST_S)


@pytest.mark.parametrize(
  'text, want',
  [
    ('```py\nx\n```', [('py', 'x\n')]),
    ('```\n```\n```\ny\n```', [('', ''), ('', 'y\n')]),
    ('```py\na\n```js\nb\n```\nc\n```', [('py', 'a\n```js\nb\n')]),
    (' \t``` c++ title="x"\n\x0b\r\n\t```  \n', [('c++', '\x0b\r\n')]),
    ('a ```\nx\n```', []),
    ('```x`y\nx\n```', []),
    ('```\nx', []),
    ('', []),
  ],
)
def test_fenced_blocks(text, want):
  assert answer_span.fences(text) == want


@pytest.mark.parametrize(
  'text, want',
  [
    ('<a>1</a> <a>2</a>', '2'),
    ('<a>1</a> <a>2', '1'),
    ('<a><a>1</a></a>', '<a>1'),
    ('</a><a>\n</a>', '\n'),
    ('<a>', None),
    ('</a>', None),
    ('<a></a>', ''),
  ],
)
def test_the_last_pair_of_tags(text, want):
  assert answer_span.in_tag(text, 'a') == want
