"""report.html of generated run directories: data never becomes markup, and damaged files are left out."""

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
  """The elements of a page, and the content of its data blocks."""

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
  """Applies `change` to the lines of a file."""
  with open(path) as file:
    lines = file.read().split('\n')
  with open(path, 'w') as file:
    file.write('\n'.join(change(lines)))


def test_the_text_of_a_rollout_never_becomes_markup(tmp_path):
  folder = run_folder.make(tmp_path / 'a<b>&"run', prompts=8, pool=8)
  text = page.render([folder])
  parsed = Parsed(text)
  assert run_folder.EVIL in parsed.blocks['file0-0'].replace('\\"', '"')
  assert 'img' not in parsed.tags and 'onerror' not in text and 'b' not in parsed.tags
  assert parsed.tags.count('script') == len(parsed.blocks) + 1
  assert '<title>Report: a&lt;b&gt;&amp;&quot;run</title>' in text


def test_the_page_loads_nothing_from_the_network(tmp_path):
  text = page.render([run_folder.make(tmp_path / 'run')])
  parsed = Parsed(text)
  assert not [v for k, v in parsed.attributes if k in ('src', 'srcset')]
  links = [v for k, v in parsed.attributes if k == 'href']
  assert all(v.startswith('#') or v == 'data:,' for v in links)
  # The namespace of SVG is a name and is never fetched.
  assert set(re.findall(r'https?://[^\s\'"]+', text)) == {'http://www.w3.org/2000/svg'}
  assert '<!--' not in text.replace(parsed.blocks['run0'], '')


def test_scripts_insert_data_as_text():
  script = page.scripts()
  for api in (
    'innerHTML',
    'outerHTML',
    'insertAdjacentHTML',
    'document.write',
    'eval(',
    'Function(',
  ):
    assert api not in script


def test_an_update_without_a_batch_adds_no_point_to_a_curve(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=3)
  empty = {'training/trained_tokens': 0.0, 'actor/entropy': 0.0}
  blank = lambda lines: [json.dumps(json.loads(lines[0]) | empty), *lines[1:]]  # noqa: E731
  rewrite(os.path.join(folder, 'metrics.jsonl'), blank)
  run = run_reader.read_run(folder)
  assert run['done'] == 3 and run['curves']['actor/entropy']['x'] == [1, 2]
  assert run['curves']['critic/score/mean']['x'] == [0, 1, 2]
  (entropy,) = [c for c in run['health'] if c['title'] == 'Entropy']
  assert entropy['values'][0]['least'] > 0


def test_an_update_of_demonstrations_alone_adds_points_of_its_loss_and_none_of_rollouts(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=3)
  taught = {'training/trained_tokens': 0.0, 'training/demonstration_tokens': 9.0}
  values = {'actor/entropy': 0.0, 'actor/sft_loss': 2.5}
  change = lambda line: json.dumps(json.loads(line) | taught | values)  # noqa: E731
  rewrite(
    os.path.join(folder, 'metrics.jsonl'), lambda lines: [change(line) for line in lines if line]
  )
  curves = run_reader.read_run(folder)['curves']
  assert curves['actor/sft_loss']['x'] == [0, 1, 2] and 'actor/entropy' not in curves


def test_the_same_folder_gives_the_same_bytes(tmp_path):
  folder = run_folder.make(tmp_path / 'run')
  first = page.render([folder])
  assert page.render([folder]) == first
  read = rollouts.Rollouts(folder).refresh()
  assert page.render([folder], [read.refresh()]) == first


def test_the_index_lists_all_rollouts(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=3, prompts=2, rollouts=4)
  blocks = Parsed(page.render([folder])).blocks
  index = json.loads(blocks['index0'])
  assert index['step'] == [0] * 8 + [1] * 8 + [2] * 8 and index['files'] == [8, 8, 8]
  rows = [json.loads(x) for f in range(3) for x in blocks[f'file0-{f}'].split('\n')]
  for name in ('prompt', 'right', 'length'):
    assert index[name] == [row[name] for row in rows]
  assert [index['reasons'][r] for r in index['reason']] == [row['reason'] for row in rows]
  prompts = json.loads(blocks['prompts0'])
  assert all(json.loads(prompts[str(r['prompt'])]) == [r['input'], r['gts']] for r in rows)


def test_several_runs_share_a_page_under_distinct_names(tmp_path):
  folders = [run_folder.make(tmp_path / x / 'run', seed=i) for i, x in enumerate('ab')]
  folders.append(run_folder.make(tmp_path / 'other', steps=2))
  blocks = Parsed(page.render(folders)).blocks
  runs = [json.loads(blocks[f'run{i}']) for i in range(3)]
  assert [run['name'] for run in runs] == ['a/run', 'b/run', 'other']
  assert [run['done'] for run in runs] == [6, 6, 2] and len(
    json.loads(blocks['index2'])['step']
  ) == 16


def test_an_empty_run_has_a_page(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  run = json.loads(Parsed(page.render([str(tmp_path)])).blocks['run0'])
  assert (
    run['done'] == 0 and run['health_summary'].startswith('Not known') and run['curriculum'] is None
  )
  with pytest.raises(UserError, match='nowhere is no run directory'):
    page.render([str(tmp_path / 'nowhere')])


def test_truncated_lines_and_damaged_files_are_left_out(tmp_path):
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
  run = run_reader.read_run(folder, read)
  assert run['done'] == 2 and len(read.column('step')) == 7 + 8 + 7
  assert run['curriculum'] is None and [e['step'] for e in run['evaluations']] == [3]
  assert run['choices']['count'] == 4


def test_a_line_separator_in_a_completion_does_not_split_its_line(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=1, prompts=1, rollouts=2)
  row = dict(
    input='q', output='a\u2028b\x85c', gts='', score=1.0, step=0, prompt=0, length=3, reason='stop'
  )
  with open(os.path.join(folder, 'rollouts/step_000000.jsonl'), 'w') as file:
    file.write(json.dumps(row, ensure_ascii=False) + '\n')
  (line,) = Parsed(page.render([folder])).blocks['file0-0'].split('\n')
  assert json.loads(line)['output'] == row['output']


def test_texts_over_the_size_limit_are_dropped_except_the_newest(tmp_path):
  folder = run_folder.make(tmp_path / 'run', steps=9)
  full = rollouts.Rollouts(folder).refresh()
  limit = sum(len(file.text) for file in full.files) // 2
  limited = rollouts.Rollouts(folder, text_bytes=limit).refresh()
  has_text = [bool(file.text) for file in limited.files]
  assert has_text == [True, False, False, False] * 2 + [True]
  assert (limited.column('step') == full.column('step')).all()


def test_only_new_or_changed_files_are_read_again(tmp_path, monkeypatch):
  folder = run_folder.make(tmp_path / 'run', steps=3)
  read, parsed_files = rollouts.Rollouts(folder).refresh(), []
  parsed = rollouts._parsed_lines
  monkeypatch.setattr(
    rollouts,
    '_parsed_lines',
    lambda path: parsed_files.append(os.path.basename(path)) or parsed(path),
  )
  os.remove(os.path.join(folder, 'rollouts/step_000001.jsonl'))
  rewrite(os.path.join(folder, 'rollouts/step_000002.jsonl'), lambda lines: lines[1:])
  rewrite(os.path.join(folder, 'rollouts/step_000000.jsonl'), lambda lines: lines)
  os.utime(os.path.join(folder, 'rollouts/step_000000.jsonl'), ns=(0, read.files[0].stamp[1]))
  assert len(read.refresh().column('step')) == 8 + 7 and parsed_files == ['step_000002.jsonl']


def test_the_command_takes_several_folders_and_a_file(tmp_path, capsys):
  folders = [run_folder.make(tmp_path / x, steps=2) for x in 'ab']
  to = tmp_path / 'both.html'
  flags = ['--mode=report', f'--workdir={",".join(folders)}', f'--to={to}']
  assert main.main(flags) == 0
  out = capsys.readouterr().out
  assert out.count('Healthy: none of 12 checks has failed') == 2 and 'Most learnable' in out
  assert len(Parsed(to.read_text()).blocks) == 2 * (3 + 2)
  assert main.main(['--mode=report', f'--workdir={tmp_path / "none"}']) == 2
  assert 'is no run directory' in capsys.readouterr().err
  assert main.main([*flags[:2], f'--to={to}/x.html']) == 2


def test_a_live_report_is_written_rarely_and_its_errors_are_caught(tmp_path, monkeypatch):
  folder, written, clock = run_folder.make(tmp_path / 'run'), [], [100.0]
  monkeypatch.setattr(report.live.time, 'monotonic', lambda: clock[0])

  def write(path, *_):
    written.append(clock[0])
    clock[0] += 2.0  # seconds that writing takes
    raise OSError('no room')

  monkeypatch.setattr(report.live.page, 'write', write)
  monkeypatch.setattr(
    report.live.curriculum_report, 'summarize', lambda *_: (_ for _ in ()).throw(UserError('none'))
  )
  live = report.LiveReport(folder, 60.0, None, (), True)
  for _ in range(300):
    live.write_if_due()
    clock[0] += 1.0
  # A page that takes 2 s to write is written every 100 s at most.
  assert written == [100.0, 202.0, 304.0]
  live.write()
  assert len(written) == 4
  other = report.LiveReport(folder, 60.0, None, (), False)
  other.write()
  rare = report.LiveReport(folder, 0.0, None, (), True)
  rare.write_if_due()
  assert len(written) == 4
