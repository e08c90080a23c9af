"""A classic environment of verifiers, as its author would write it: two turns, and a rubric of weighted rewards."""

from __future__ import annotations

import datasets
import verifiers as vf

FAILING = ('raises', 'reports')  # questions of the tasks whose rollout fails


class TwoTurns(vf.MultiTurnEnv):
  async def env_response(self, messages, state, **_):
    if state['answer'] == 'raises':
      raise RuntimeError('no such tool')
    if state['answer'] == 'reports':
      raise vf.ToolError('the tool is gone')
    return [dict(role='user', content='again')]


def even(completion):
  """The share of even characters in all answers."""
  text = ''.join(m['content'] or '' for m in completion if m['role'] == 'assistant')
  return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)


async def known(answer, info):
  return float(len(answer) == info['length'])


def load_environment(questions=('12', 'raises', '345', 'reports')):
  rows = [dict(question=q, answer=q, info=dict(length=len(q))) for q in questions]
  rubric = vf.Rubric(funcs=[even, known], weights=[2.0, 0.25])
  return TwoTurns(
    dataset=datasets.Dataset.from_list(rows),
    rubric=rubric,
    max_turns=2,
    sampling_args=dict(max_tokens=5),
  )
