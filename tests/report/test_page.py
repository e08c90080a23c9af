"""report.html from folders made by hand: nothing of what a run said is markup, and damage is survived."""

from __future__ import annotations

import base64
import html.parser
import json
import os
import re
import zlib

import pytest
import run_folder

from jaxrl_llm import main, report
from jaxrl_llm.report import page, rollouts, run_reader
from jaxrl_llm.types import UserError


class Parsed(html.parser.HTMLParser):
  """What a browser makes of a page: its elements, and what lies in its blocks."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.blocks, self.attributes, self._id = [], {}, [], None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    self._id = dict(attrs).get('id') if tag == 'script' else None

  def handle_data(self, data):
    if self._id:
      self.blocks[self._id] = zlib.decompress(base64.b64decode(data)).decode()
      self._id = None


def rewrite(path, change):
  """Lines of a file, changed."""
  with open(path) as file:
    lines = file.read().split('\n')
  with open(path, 'w') as file:
    file.write('\n'.join(change(lines)))


def test_what_a_rollout_says_never_becomes_markup(tmp_path):
  folder = run_folder.make(tmp_path / 'a<b>&"run', prompts=8, pool=8)
  text = page.make([folder])
  parsed = Parsed(text)
  assert run_folder.EVIL in parsed.blocks['file0-0'].replace('\\"', '"')
  assert 'img' not in parsed.tags and 'onerror' not in text and 'b' not in parsed.tags
  assert parsed.tags.count('script') == len(parsed.blocks) + 1
  assert '<title>Report: a&lt;b&gt;&amp;&quot;run</title>' in text


def test_the_page_fetches_nothing(tmp_path):
  text = page.make([run_folder.make(tmp_path / 'run')])
  parsed = Parsed(text)
  assert not [v for k, v in parsed.attributes if k in ('src', 'srcset')]
  links = [v for k, v in parsed.attributes if k == 'href']
  assert all(v.startswith('#') or v == 'data:,' for v in links)
  # The namespace of SVG is a name, and no address.
  assert set(re.findall(r'https?://[^\s\'"]+', text)) == {'http://www.w3.org/2000/svg'}
  assert '<!--' not in text.replace(parsed.blocks['run0'], '')


def test_scripts_put_text_on_the_screen_as_text():
  script = page.scripts()
  for way in (
    'innerHTML',
    'outerHTML',
    'insertAdjacentHTML',
    'document.write',
    'eval(',
    'Function(',
  ):
    assert way not in script


def test_an_update_without_a_batch_is_no_point_of_a_curve(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=3)
  empty = {'training/trained_tokens': 0.0, 'actor/entropy': 0.0}
  blank = lambda lines: [json.dumps(json.loads(lines[0]) | empty), *lines[1:]]  # noqa: E731
  rewrite(os.path.join(folder, 'metrics.jsonl'), blank)
  told = run_reader.gather(folder)
  assert told['done'] == 3 and told['curves']['actor/entropy']['x'] == [1, 2]
  assert told['curves']['critic/score/mean']['x'] == [0, 1, 2]
  (entropy,) = [c for c in told['health'] if c['title'] == 'Entropy']
  assert entropy['values'][0]['least'] > 0


def test_the_same_folder_makes_the_same_bytes(tmp_path):
  folder = run_folder.make(tmp_path / 'run')
  first = page.make([folder])
  assert page.make([folder]) == first
  read = rollouts.Rollouts(folder).refresh()
  assert page.make([folder], [read.refresh()]) == first


def test_all_rollouts_can_be_told_apart_and_found(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=3, prompts=2, rollouts=4)
  blocks = Parsed(page.make([folder])).blocks
  index = json.loads(blocks['index0'])
  assert index['step'] == [0] * 8 + [1] * 8 + [2] * 8 and index['files'] == [8, 8, 8]
  rows = [json.loads(x) for f in range(3) for x in blocks[f'file0-{f}'].split('\n')]
  for name in ('prompt', 'right', 'length'):
    assert index[name] == [row[name] for row in rows]
  assert [index['reasons'][r] for r in index['reason']] == [row['reason'] for row in rows]
  asked = json.loads(blocks['prompts0'])
  assert all(json.loads(asked[str(r['prompt'])]) == [r['input'], r['gts']] for r in rows)


def test_several_runs_stand_side_by_side_under_names_of_their_own(tmp_path):
  folders = [run_folder.make(tmp_path / x / 'run', seed=i) for i, x in enumerate('ab')]
  folders.append(run_folder.make(tmp_path / 'other', steps=2))
  blocks = Parsed(page.make(folders)).blocks
  runs = [json.loads(blocks[f'run{i}']) for i in range(3)]
  assert [run['name'] for run in runs] == ['a/run', 'b/run', 'other']
  assert [run['done'] for run in runs] == [6, 6, 2] and len(
    json.loads(blocks['index2'])['step']
  ) == 16


def test_an_empty_run_has_a_page(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  run = json.loads(Parsed(page.make([str(tmp_path)])).blocks['run0'])
  assert run['done'] == 0 and run['overall'].startswith('Not known') and run['curriculum'] is None
  with pytest.raises(UserError, match='nowhere is no run folder'):
    page.make([str(tmp_path / 'nowhere')])


def test_lines_cut_short_and_files_of_nonsense_are_left_out(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=3, prompts=2, rollouts=4)
  cut = lambda lines: [*lines[:-2], lines[-2][: len(lines[-2]) // 2]]  # noqa: E731
  for name in ('metrics.jsonl', 'choices.jsonl', 'rollouts/step_000002.jsonl'):
    rewrite(os.path.join(folder, name), cut)
  rewrite(
    os.path.join(folder, 'rollouts/step_000000.jsonl'), lambda x: ['[1]', '{"a":', '{}', *x[1:]]
  )
  for name in ('curriculum.json', 'environment.json', 'eval/step_000000.json'):
    with open(os.path.join(folder, name), 'w') as file:
      file.write('{"a": [')
  read = rollouts.Rollouts(folder).refresh()
  told = run_reader.gather(folder, read)
  assert told['done'] == 2 and len(read.column('step')) == 7 + 8 + 7
  assert told['curriculum'] is None and [e['step'] for e in told['evaluations']] == [3]
  assert told['choices']['count'] == 4


def test_a_line_separator_in_an_answer_cuts_no_line(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=1, prompts=1, rollouts=2)
  row = dict(
    input='q', output='a\u2028b\x85c', gts='', score=1.0, step=0, prompt=0, length=3, reason='stop'
  )
  with open(os.path.join(folder, 'rollouts/step_000000.jsonl'), 'w') as file:
    file.write(json.dumps(row, ensure_ascii=False) + '\n')
  (line,) = Parsed(page.make([folder])).blocks['file0-0'].split('\n')
  assert json.loads(line)['output'] == row['output']


def test_texts_give_way_when_there_is_no_room_and_the_newest_stays(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=9)
  whole = rollouts.Rollouts(folder).refresh()
  room = sum(len(file.text) for file in whole.files) // 2
  some = rollouts.Rollouts(folder, room=room).refresh()
  kept = [bool(file.text) for file in some.files]
  assert kept == [True, False, False, False] * 2 + [True]
  assert (some.column('step') == whole.column('step')).all()


def test_only_what_is_new_or_changed_is_read_again(tmp_path, monkeypatch):
  folder = run_folder.make(tmp_path / 'run', steps=3)
  read, seen = rollouts.Rollouts(folder).refresh(), []
  parsed = rollouts._parsed
  monkeypatch.setattr(
    rollouts, '_parsed', lambda path: seen.append(os.path.basename(path)) or parsed(path)
  )
  os.remove(os.path.join(folder, 'rollouts/step_000001.jsonl'))
  rewrite(os.path.join(folder, 'rollouts/step_000002.jsonl'), lambda lines: lines[1:])
  rewrite(os.path.join(folder, 'rollouts/step_000000.jsonl'), lambda lines: lines)
  os.utime(os.path.join(folder, 'rollouts/step_000000.jsonl'), ns=(0, read.files[0].stamp[1]))
  assert len(read.refresh().column('step')) == 8 + 7 and seen == ['step_000002.jsonl']


def test_the_command_takes_several_folders_and_a_file(tmp_path, capsys):
  folders = [run_folder.make(tmp_path / x, steps=2) for x in 'ab']
  to = tmp_path / 'both.html'
  flags = ['--mode=report', f'--workdir={",".join(folders)}', f'--to={to}']
  assert main.main(flags) == 0
  out = capsys.readouterr().out
  assert out.count('Well: none of 12 checks has failed') == 2 and 'Most learnable' in out
  assert len(Parsed(to.read_text()).blocks) == 2 * (3 + 2)
  assert main.main(['--mode=report', f'--workdir={tmp_path / "none"}']) == 2
  assert 'is no run folder' in capsys.readouterr().err
  assert main.main([*flags[:2], f'--to={to}/x.html']) == 2


def test_a_run_writes_it_seldom_and_survives_what_goes_wrong(tmp_path, monkeypatch):
  folder, written, clock = run_folder.make(tmp_path / 'run'), [], [100.0]
  monkeypatch.setattr(report.live.time, 'monotonic', lambda: clock[0])

  def write(path, *_):
    written.append(clock[0])
    clock[0] += 2.0  # what it takes
    raise OSError('no room')

  monkeypatch.setattr(report.live.page, 'write', write)
  monkeypatch.setattr(report.live.told, 'make', lambda *_: (_ for _ in ()).throw(UserError('none')))
  live = report.LiveReport(folder, 60.0, None, (), True)
  for _ in range(300):
    live.write_if_due()
    clock[0] += 1.0
  # A page that takes two seconds is written every hundred, however often it is asked for.
  assert written == [100.0, 202.0, 304.0]
  live.write()
  assert len(written) == 4
  other = report.LiveReport(folder, 60.0, None, (), False)
  other.write()
  rare = report.LiveReport(folder, 0.0, None, (), True)
  rare.write_if_due()
  assert len(written) == 4
