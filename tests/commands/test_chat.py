"""A conversation: the prompts that the model gets, turn by turn."""

from __future__ import annotations

import io

import pytest

from jaxrl_llm import main, models
from jaxrl_llm.commands import chat, generate
from jaxrl_llm.config import schema
from jaxrl_llm.types import UserError

SCRATCH = dict(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64)
SETTINGS = dict(max_tokens=8, temperature=1.0, seed=5, n=1)
CHAT = schema.DataConfig()


@pytest.fixture(scope='module')
def model():
  return models.load('scratch', scratch=SCRATCH, seed=0)


class CompletionStreamer:
  """Stands for the model: remembers what it was asked, and is 4 tokens a message long."""

  def __init__(self, model, **settings):
    self.asked, self.settings = [], settings
    CompletionStreamer.last = self

  def prompt_tokens(self, prompt):
    return 4 * len(prompt)

  def stream(self, prompt, seed):
    self.asked.append((prompt, seed))
    if prompt == 'long' or prompt[-1] == dict(role='user', content='long'):
      raise UserError('it does not fit')
    yield from ('so', ' be', ' it')
    if prompt[-1] == dict(role='user', content='stop'):
      raise KeyboardInterrupt


def talk(monkeypatch, model, *lines, rendering=CHAT) -> str:
  remaining = iter(lines)

  def read(_):
    try:
      return next(remaining)
    except StopIteration:
      raise EOFError from None

  monkeypatch.setattr(chat, 'CompletionStreamer', CompletionStreamer)
  out = io.StringIO()
  chat.run(model, SETTINGS, rendering, read=read, out=out)
  return out.getvalue()


def says(*contents):
  roles = ('user', 'assistant')
  return [dict(role=roles[i % 2], content=text) for i, text in enumerate(contents)]


def test_a_line_goes_on_from_what_was_said_and_an_empty_one_begins_anew(monkeypatch, model):
  out = talk(monkeypatch, model, 'one', 'two', '', 'three', '/quit', 'four')
  want = [says('one'), says('one', 'so be it', 'two'), says('three')]
  assert [prompt for prompt, _ in CompletionStreamer.last.asked] == want
  assert (
    len({seed for _, seed in CompletionStreamer.last.asked}) == 3 and out.count('so be it') == 3
  )


def test_the_oldest_turns_give_way(monkeypatch, model):
  lines = [str(i) for i in range(9)]  # the model has room for 14 messages beside an answer
  out = talk(monkeypatch, model, *lines)
  longest = [len(prompt) for prompt, _ in CompletionStreamer.last.asked]
  assert longest == [1, 3, 5, 7, 9, 11, 13, 13, 13]
  assert (
    CompletionStreamer.last.asked[-1][0][0]['content'] == '2'
    and '(2 older messages do not fit' in out
  )


def test_without_a_template_lines_have_no_past(monkeypatch, model):
  plain = schema.DataConfig(chat=False, template='Q: {question}')
  for rendering, want in ((plain, ['Q: one', 'Q: two']), (None, ['one', 'two'])):
    talk(monkeypatch, model, 'one', 'two', rendering=rendering)
    assert [prompt for prompt, _ in CompletionStreamer.last.asked] == want
    assert CompletionStreamer.last.settings == dict(max_tokens=8, temperature=1.0, chat=False)


def test_every_line_stands_in_the_template_behind_the_system_message(monkeypatch, model):
  rendering = schema.DataConfig(system='Be brief.', template='Sum: {question}')
  lines = [str(i) for i in range(9)]
  talk(monkeypatch, model, *lines, rendering=rendering)
  prompts = [prompt for prompt, _ in CompletionStreamer.last.asked]
  system = dict(role='system', content='Be brief.')
  assert prompts[1] == [system, *says('Sum: 0', 'so be it', 'Sum: 1')]
  assert all(prompt[0] == system for prompt in prompts) and prompts[-1][1]['content'] == 'Sum: 2'


def test_what_does_not_fit_and_what_is_stopped_end_an_answer_and_not_the_talk(monkeypatch, model):
  out = talk(monkeypatch, model, 'long', 'stop', 'on')
  assert (
    '(it does not fit)' in out and 'so be it ...' in out and len(CompletionStreamer.last.asked) == 3
  )


def test_a_real_model_answers(model):
  lines, out = iter(['hello', '/quit']), io.StringIO()
  chat.run(model, SETTINGS, None, read=lambda _: next(lines), out=out)
  assert len(out.getvalue().splitlines()) >= 2


@pytest.mark.parametrize('terminal', [True, False])
def test_generate_without_prompts_is_a_talk_in_a_terminal_and_an_error_elsewhere(
  terminal, monkeypatch, capsys
):
  given = []
  monkeypatch.setattr(main.sys.stdin, 'isatty', lambda: terminal, raising=False)
  monkeypatch.setattr(generate, 'generate_text', lambda *args: given.append(args[2]))
  assert main.main(['--mode=generate', '--config.model=scratch']) == (0 if terminal else 2)
  assert given == ([[]] if terminal else [])
  assert terminal or 'has 0 prompts' in capsys.readouterr().err
