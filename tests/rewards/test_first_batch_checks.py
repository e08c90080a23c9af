"""What the first batch tells of a grader that cannot work, and of one that can."""

from __future__ import annotations

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.monitoring import alarms as alarms_lib
from jaxrl_llm.types import Row

ROWS = [Row(str(n), f'What is {n} + 1?', (), str(n + 1), 'sums', {}) for n in range(4)]
RIGHT = [row.answer for row in ROWS]
PLAIN = [row.question for row in ROWS]

# As EasyR1 once had it: a reward for a box, and a prompt that asks for one.
OWN = """
import re
def boxed(solution_str, ground_truth):
  return float(bool(re.search(r'[\\\\]boxed[{].*[}]', solution_str)))
"""


def looked(spec, texts, prompts=PLAIN):
  spec = dict(workers=1) | spec
  scores = rewards.score(ROWS, texts, spec)
  with rewards.Pool(spec) as pool:
    row = rewards.check_first_batch(spec, pool, ROWS, texts, prompts, scores.parts_BxK)
  own = alarms_lib.Health(configs.default(), 'float32')
  _, alarms = own.observe(row | {'training/global_step': 0})
  return row, [alarm.name for alarm in alarms if alarm.name in alarms_lib.FIRST]


@pytest.mark.parametrize(
  'spec, texts, names',
  [
    (dict(fn='number'), RIGHT, []),
    (dict(fn='number'), ['1', *'xxx'], []),  # one answer that can be read, and it is right
    (dict(fn='number'), ['99', *'xxx'], ['unrewarded']),
    (dict(fn='number'), list('xxxx'), ['format', 'unrewarded']),
    (dict(fn='tagged', tag='b'), RIGHT, ['format', 'unrewarded']),
    (dict(fn='tagged', tag='b'), ['<b>1</b>', *RIGHT[1:]], []),
    (dict(fn='exact', parts=(dict(fn='bare_number'),)), ['99'] * 4, []),
  ],
)
def test_replies_that_cannot_be_read_or_are_never_rewarded(spec, texts, names):
  assert looked(spec, texts)[1] == names


def test_a_reward_that_the_prompt_earns_is_found_whichever_grader_gives_it(tmp_path, monkeypatch):
  (tmp_path / 'own_look.py').write_text(OWN)
  monkeypatch.syspath_prepend(str(tmp_path))
  asks = [f'Put the answer into \\boxed{{}}.\n{text}' for text in PLAIN]
  spec = dict(fn='number', parts=(dict(fn='own_look:boxed', weight=0.1),))
  row, names = looked(spec, RIGHT, asks)
  assert row['grade/prompts_paid'] == 1.0 and names == ['prompt_paid']
  row, names = looked(spec, RIGHT, ['Think of 1.', *PLAIN[1:]])
  assert row['grade/prompts_paid'] == 0.25 and names == []  # now and then by chance


def test_a_grader_that_compares_replies_says_nothing_of_prompts(tmp_path, monkeypatch):
  (tmp_path / 'own_first.py').write_text('def f(completions, **_): return [1.0] * len(completions)')
  monkeypatch.syspath_prepend(str(tmp_path))
  own = dict(fn='own_first:f', batched='group')
  assert 'grade/prompts_paid' not in looked(own, RIGHT)[0]
  row, names = looked(dict(fn='exact', parts=(own,)), RIGHT)
  assert row['grade/prompts_paid'] == 0.0 and names == []
