"""R3L's reading of reflections, and the tokens that it learns behind a pivot."""

from __future__ import annotations

import json
import types

import numpy as np

from jaxrl_llm.curriculum import reflection
from tests.objective.official import lib, r3l

FOLDER = 'trinity/common/workflows/envs/R3L/dapo/'
WORKFLOW, UTILS = FOLDER + 'R3L_workflow.py', FOLDER + 'utils.py'
OWNER = 'R3LDapoWorkflow'
OFFICIAL = lib.Official(*r3l.PINNED, (WORKFLOW, UTILS), 'Apache-2.0')
FLAW = dict(
  trajectory_summary='It added only two numbers.',
  root_cause_analysis='Why? It forgot the third – «3».',
  trajectory_outcome='failure',
  improvement_suggestion='Count the terms first.',
  retry_from_step=1,
)


def changed(**fields) -> str:
  return json.dumps(FLAW | fields)


REPLIES = (
  changed(),
  f'Here it is:\n```json\n{changed()}\n```\nGood luck!',
  *(changed(retry_from_step=x) for x in (0, 2, 3, -1, '1', ' 2 ', 1.7, True, None, 'last', [1])),
  *(changed(retry_from_step=x) for x in (float('inf'), float('nan'), '', '1.0')),
  *(changed(trajectory_outcome=x) for x in ('success', 'success_but_inefficient', 'Failure', None)),
  changed(trajectory_outcome=['failure']),
  *(json.dumps({k: v for k, v in FLAW.items() if k != name}) for name in FLAW),
  *(changed(**{name: None}) for name in FLAW),
  changed(improvement_suggestion=''),
  changed(more={'why': {'deep': 1}}),
  changed() + ' and }',
  changed() + changed(),
  json.dumps([FLAW]),
  f'[{changed()}, 1]',
  changed().replace('"', "'"),
  changed()[:-1],
  changed()[1:],
  '}{',
  'Step 1 is wrong.',
  '12',
  'null',
  '',
)
STEPS = 1, 2, 3
ATTEMPTS = 'a\nbc\n\ndef\ng', 'ab\ncd\nefg\nhi', ' \nx\ny\nz\n', 'one line'
WITHOUT = {'*': 'its inputs are texts'}
MUTANTS = {
  'the first closing brace': (reflection, "reply.rfind('}')", "reply.find('}')"),
  'the last opening brace': (reflection, "reply.find('{')", "reply.rfind('{')"),
  'a success': (reflection, "('success_but_inefficient', 'failure')", "('success', 'failure')"),
  'a pivot behind the attempt': (reflection, '0 <= pivot < steps', '0 <= pivot <= steps'),
  'a pivot before the attempt': (reflection, '0 <= pivot < steps', 'pivot < steps'),
  'no suggestion': (reflection, "report.get('improvement_suggestion') is None", 'False'),
  'no analysis': (reflection, "_FIELDS = ('trajectory_summary', 'root_cause_analysis')", "_FIELDS = ('trajectory_summary',)"),
  'no summary': (reflection, "_FIELDS = ('trajectory_summary', 'root_cause_analysis')", "_FIELDS = ('root_cause_analysis',)"),
  'no outcome': (reflection, "report.get('trajectory_outcome')", "report.get('trajectory_outcome', 'failure')"),
  'a rounded pivot': (reflection, 'return int(step)', 'return round(float(step))'),
  'on one line': (reflection, 'indent=2, ', ''),
  'escaped': (reflection, 'ensure_ascii=False', 'ensure_ascii=True'),
  'one step more is kept': (reflection, '>= pivot else', '> pivot else'),
  'half a step': (reflection, "whole, _, _ = decode(token_ids[:middle]).rpartition('\\n')", 'whole = decode(token_ids[:middle])'),
}  # fmt: skip


def draw(seed):
  """All replies on attempts of one, two and three steps, and all pivots of the attempts."""
  del seed
  pairs = [(reply, steps) for reply in range(len(REPLIES)) for steps in STEPS]
  pivots = [
    (number, pivot)
    for number, text in enumerate(ATTEMPTS)
    for pivot in range(len(reflection.steps_of(text)))
  ]
  return dict(pairs=np.array(pairs), pivots=np.array(pivots))


def encoded(text: str) -> tuple[int, int]:
  """Length and a weighted sum of the character codes."""
  return len(text), sum((i + 1) * ord(c) for i, c in enumerate(text))


def in_steps(text: str) -> np.ndarray:
  """1 for the characters of steps, 0 for line ends and blank lines."""
  lines = [line for line in text.splitlines(keepends=True)]
  return np.array([bool(line.strip()) and c != '\n' for line in lines for c in line], float)


def padded(masks: list[np.ndarray]) -> np.ndarray:
  """One row of a mask each."""
  width = max(map(len, ATTEMPTS))
  return np.array([np.pad(mask, (0, width - len(mask))) for mask in masks])


def official(torch, read, data):
  """Its parser, its check and its guidance, and the tokens in the loss after its change of a mask."""
  silent = dict(json=json, print=lambda *_: None)
  utils = types.SimpleNamespace(format_trajectory_for_reflection=lambda trajectory: '')
  parse = lib.method(read(WORKFLOW), OWNER, 'get_reflect', utils=utils, **silent)
  mask_prefix = lib.method(read(WORKFLOW), OWNER, '_adjust_action_mask_for_retry', torch=torch)
  check = lib.functions(read(UTILS), ('validate_reflect_report',), **silent)
  template = types.SimpleNamespace(render=lambda report='': report)
  environment = types.SimpleNamespace(get_template=lambda name: template)
  guidance = ('reflect_report_to_guidance_prompt',)
  guide = lib.functions(read(UTILS), guidance, _get_jinja_env=lambda: environment, **silent)

  def retry(reply: str, steps: int) -> tuple[int, int, int]:
    chat = lambda *_, **__: [types.SimpleNamespace(response_text=reply)]  # noqa: E731
    own = types.SimpleNamespace(chat=chat)
    own = types.SimpleNamespace(
      model=own, reflection_template=template, temperature=1.0, max_reflect_tokens=1
    )
    report, _, _ = parse(own, [])
    try:
      is_valid, is_perfect = check.validate_reflect_report(report, steps)
    except OverflowError:  # an infinite pivot; its caller catches all errors, and there is no retry
      is_valid = is_perfect = False
    if not is_valid or is_perfect:
      return -1, 0, 0
    text = guide.reflect_report_to_guidance_prompt(report)
    return int(report['retry_from_step']), *encoded(text)

  masks = []
  for number, pivot in data['pivots'].tolist():
    experience = types.SimpleNamespace(action_mask=torch.tensor(in_steps(ATTEMPTS[number])))
    mask_prefix(None, experience, pivot)
    masks.append(experience.action_mask.numpy())
  retries = [retry(REPLIES[reply], steps) for reply, steps in data['pairs'].tolist()]
  return dict(retries=retries, masks=padded(masks))


def ours(data):
  rule = reflection.Reflection(reflection.REQUEST, reflection.GUIDANCE)
  retries, masks = [], []
  for reply, steps in data['pairs'].tolist():
    report = rule.report_in(REPLIES[reply], steps)
    retries.append((-1, 0, 0) if report is None else (report.pivot, *encoded(report.text)))
  for number, pivot in data['pivots'].tolist():
    text = ATTEMPTS[number]
    decode = lambda ids: ''.join(map(chr, ids))  # noqa: E731
    kept = reflection.tokens_before([*map(ord, text)], decode, pivot)
    masks.append(in_steps(text) * (np.arange(len(text)) >= kept))
  return dict(retries=np.array(retries), masks=padded(masks))


lib.main(__name__)
