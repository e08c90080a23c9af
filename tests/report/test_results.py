"""The parts of a report that say what a run came to: measures with intervals, examples, time, and lists of runs."""

from __future__ import annotations

import html.parser
import json
import os
import pathlib
import re
import shutil

import pytest
import run_folder

from jaxrl_llm import main
from jaxrl_llm.report import page, results, rollouts, run_reader, runs, timing


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  return pathlib.Path(run_folder.make(tmp_path / 'run', steps=4, prompts=3, rollouts=4))


def rewrite(path: pathlib.Path, change) -> None:
  """Applies `change` to every row of a JSON-lines file."""
  lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
  path.write_text(''.join(json.dumps(row) + '\n' for row in lines))


def test_measures_have_intervals_and_the_most_important_comes_first(folder):
  first, last = results.evaluations(str(folder))
  assert (first['step'], last['step'], last['prompts']) == (0, 4, 200)
  # best@n equals pass@n where scores are 0 and 1.
  assert list(last['measures']) == ['greedy', 'mean@4', 'pass@4']
  assert last['measures']['greedy'] == [0.7, pytest.approx(0.64), pytest.approx(0.77)]
  assert first['metrics']['val-core/all/acc/best@4'] == pytest.approx(0.3)


def test_evaluations_with_other_settings_and_damaged_ones_are_left_out(folder):
  other = json.loads((folder / 'eval/step_000004.json').read_text()) | dict(step=4)
  (folder / 'eval/step_000004_0a1b2c3d.json').write_text(json.dumps(other))
  (folder / 'eval/step_000002.json').write_text('{"step": 2, "metrics": ')
  assert [e['step'] for e in results.evaluations(str(folder))] == [0, 4]


def test_an_evaluation_without_intervals_shows_its_means(folder):
  path = folder / 'eval/step_000004.json'
  record = json.loads(path.read_text())
  del record['groups']
  path.write_text(json.dumps(record))
  last = results.evaluations(str(folder))[-1]
  assert last['measures']['greedy'] == [0.7, None, None] and last['prompts'] is None


def examples(folder, **changes) -> dict:
  return results.examples(rollouts.Rollouts(str(folder), **changes).refresh())


def test_a_good_and_a_bad_completion_are_of_the_newest_mixed_group(folder):
  def score(step, prompt_index, scores):
    path = folder / f'rollouts/step_{step:06d}.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, value in zip(rows[4 * prompt_index :], scores, strict=False):
      row |= dict(score=value, right=int(value == 1), output=f'{value}' + 'x' * row['length'])
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))

  for step in range(4):
    for index in range(3):
      score(step, index, [0.0] * 4)
  score(2, 1, [0.0, 1.0, 0.5, 1.0])
  score(3, 0, [0.0, 0.9, 0.0, 0.0])  # graded, and none is right
  found = examples(folder)
  assert found['good']['step'] == found['bad']['step'] == 2
  assert found['good']['right'] and not found['bad']['right']
  assert (found['good']['score'], found['bad']['score']) == (1.0, 0.0)
  index = run_reader.rollout_index(rollouts.Rollouts(str(folder)).refresh())
  for example in found.values():
    at = example['index']
    assert (index['step'][at], index['score'][at]) == (2, example['score'])
    assert index['prompt'][at] == example['prompt']
  score(2, 1, [0.0] * 4)
  found = examples(folder)
  assert found['good']['step'] == 3 and found['good']['score'] == 0.9


def test_examples_of_messages_of_long_texts_and_of_no_rollout(folder, tmp_path):
  message = lambda row: row | dict(input=[dict(role='user', content='Hi?')], output='y' * 9999)  # noqa: E731
  rewrite(folder / 'rollouts/step_000003.jsonl', message)
  shutil.copytree(folder, tmp_path / 'last')
  for step in range(3):
    os.remove(tmp_path / f'last/rollouts/step_{step:06d}.jsonl')
  good = examples(tmp_path / 'last')['good']
  assert good['question'] == 'Hi?' and len(good['output']) < 2010 and good['output'].endswith(' …')
  assert examples(tmp_path / 'nothing') == {}
  assert run_reader.read_run(str(folder))['examples']['good']


ROW = {'training/global_step': 0, 'timing_s/gen_update': 8.0, 'timing_s/grade': 1.0}
ROW |= {'timing_s/choose': 0.5, 'timing_s/step': 10.0}


def test_traced_steps_split_update_and_rollout():
  times = timing.step_times([ROW])
  assert times['total'] == dict(choose=0.5, gen_update=8.0, grade=1.0, other=0.5)
  assert not times['split']
  device = dict(busy=dict(update=0.6, generate=0.2, all=0.9))
  times = timing.step_times([ROW], device)
  assert times['total'] == dict(update=6.0, rollout=2.0, choose=0.5, grade=1.0, other=0.5)
  assert times['split'] and timing.step_times([], device)['total'] == dict(other=0.0)


def test_halves_that_were_timed_apart_are_not_counted_twice():
  row = ROW | {'timing_s/update': 5.0, 'timing_s/rollout': 3.0}
  total = timing.step_times([row])['total']
  assert total == dict(choose=0.5, grade=1.0, rollout=3.0, update=5.0, other=0.5)


def test_weights_of_the_reward_functions_are_named_as_in_the_rollouts(folder):
  parts = [dict(fn='my_task:short', weight=0.25), dict(fn='tags', name='form')]
  config = dict(rewards=dict(fn='number', parts=parts), environment=dict(fn='guess', weight=2))
  config['environment']['judge'] = 'rewards'
  (folder / 'config.json').write_text(json.dumps(config))
  weights = run_reader.read_run(str(folder))['weights']
  assert weights == dict(number=1.0, short=0.25, form=1.0, environment=2.0)


# Lists of runs.


@pytest.fixture
def parent(tmp_path) -> pathlib.Path:
  """Three runs at two depths, beside folders that are none."""
  for at, name in enumerate(('a', 'deep/er/b', 'c</script><img src=x>')):
    run_folder.make(tmp_path / 'runs' / name, steps=2 + at, seed=at)
  (tmp_path / 'runs/model').mkdir()
  (tmp_path / 'runs/model/config.json').write_text('{"hidden_size": 4}')
  run_folder.make(tmp_path / 'runs/a/export/inner', steps=1)
  page.write(str(tmp_path / 'runs/a/report.html'), [str(tmp_path / 'runs/a')])
  return tmp_path / 'runs'


def test_the_runs_below_a_folder_are_found(parent):
  found = [os.path.relpath(path, parent) for path in runs.find(str(parent))]
  assert found == ['a', 'c</script><img src=x>', 'deep/er/b']
  assert runs.find(str(parent / 'a')) == [str(parent / 'a')] and runs.find(str(parent / 'no')) == []


def test_a_summary_has_results_health_and_config_and_links_to_its_report(parent, tmp_path):
  first, odd, deep = runs.read_all(runs.find(str(parent)), str(tmp_path / 'runs.html'))
  assert (first['name'], odd['name'], deep['name']) == ('a', 'c</script><img src=x>', 'deep/er/b')
  assert first['link'] == 'runs/a/report.html' and deep['link'] == ''
  assert (first['done'], first['steps'], first['state']) == (2, 2, 'passing')
  assert [e['step'] for e in first['evaluations']] == [0, 2]
  assert first['evaluations'][1]['measures']['greedy'][0] == 0.7
  assert deep['config']['seed'] == '1' and deep['minutes'] > 0 and 0 <= deep['reward'] <= 1
  assert set(first['curves']) <= {
    'critic/score/mean',
    'curriculum/observed_success',
    'response_length/mean',
  }


class Parsed(html.parser.HTMLParser):
  def __init__(self, text):
    super().__init__()
    self.tags, self.links = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [v for k, v in attrs if k in ('href', 'src', 'srcset')]


def test_the_command_lists_the_runs_of_a_folder_in_one_offline_file(parent, capsys):
  assert main.main(['--mode=report', f'--workdir={parent}']) == 0
  out = capsys.readouterr().out
  assert '3 runs' in out and f'the report is {parent}/runs.html' in out.replace('\n', '')
  text = (parent / 'runs.html').read_text()
  parsed = Parsed(text)
  assert 'img' not in parsed.tags and parsed.tags.count('script') == 2
  assert all(link.startswith('#') or link == 'data:,' for link in parsed.links)
  assert set(re.findall(r'https?://[^\s\'"]+', text)) == {'http://www.w3.org/2000/svg'}
  assert page.render_runs(runs.find(str(parent)), str(parent / 'runs.html')) == text
  both = f'--workdir={parent}/deep,{parent}/a', f'--to={parent}/two.html'
  assert main.main(['--mode=report', *both]) == 0 and (parent / 'two.html').exists()
  (parent / 'empty').mkdir()
  assert main.main(['--mode=report', f'--workdir={parent}/empty']) == 2
  assert 'empty is no run directory' in capsys.readouterr().err


def test_scripts_of_both_pages_insert_data_as_text():
  for script in (page.scripts(), page.scripts(page._RUNS_SCRIPTS)):
    for api in ('innerHTML', 'outerHTML', 'insertAdjacentHTML', 'document.write', 'eval('):
      assert api not in script


def test_the_page_opens_with_the_result(folder):
  text = page.render([str(folder)])
  sections = re.findall(r'<section id="(\w+)"', text)
  assert sections[:2] == ['result', 'learning'] and 'health' in sections
  assert re.findall(r'<li><a href="#(\w+)">', text) == sections
