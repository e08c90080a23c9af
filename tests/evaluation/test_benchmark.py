"""--mode=eval and training with config.evaluation.benchmark: its rows, its verifier, its votes."""

from __future__ import annotations

import json

import judges
import pytest
import tiny_job

from jaxrl_llm import main
from jaxrl_llm.rewards import verifiers
from jaxrl_llm.types import Row

GSM8K = [
  dict(question=f'{a}+1=', answer=f'One more than {a} is {a + 1}.\n#### {a + 1}') for a in range(6)
]
MATH_500 = [
  dict(
    problem=f'{a}/2=', solution='', answer=f'\\frac{{{a}}}{{2}}', subject='Algebra', level=1 + a % 2
  )
  for a in range(1, 5)
]


def lines(path, rows) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def record_of(folder) -> dict:
  """The newest file of eval/."""
  path = max((folder / 'eval').glob('step_*.json'), key=lambda path: path.stat().st_mtime_ns)
  return json.loads(path.read_text())


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run on digits with a reward function that is not a verifier, evaluated on a benchmark."""
  folder = tmp_path_factory.mktemp('benchmark')
  benchmark = lines(folder / 'gsm8k' / 'test.jsonl', GSM8K)
  evaluation = tiny_job.CONFIG['evaluation'] | dict(prompts=100, benchmark=benchmark)
  config = tiny_job.config_file(folder, **tiny_job.UNTAUGHT, steps=1, evaluation=evaluation)
  assert main.main([f'--config={config}', f'--workdir={folder}/run']) == 0
  return folder / 'run'


def test_training_evaluates_on_the_benchmark_with_its_verifier(run):
  record = record_of(run)
  greedy = [row for row in record['rows'] if row['kind'] == 'greedy']
  assert [row['question'] for row in greedy] == [row['question'] for row in GSM8K]
  assert [row['gts'] for row in greedy] == [str(a + 1) for a in range(6)]
  assert record['grader']['fn'] == 'number'
  # The reward function of the training would pay half of these completions.
  for row in record['rows']:
    label = Row(row['id'], row['question'], (), row['gts'], row['source'], {})
    assert row['score'] == [verifiers.number(text, label) for text in row['output']]
    assert row['kind'] == 'greedy' or len(row['output']) == 2
  assert any(judges.odd('', text, '') for row in record['rows'] for text in row['output'])
  trained = json.loads((run / 'config.json').read_text())
  assert trained['rewards']['fn'] == 'judges:odd'
  measures = record['groups'][0]['measures']
  assert {'greedy', 'pass@2', 'maj@2'} <= measures.keys()
  assert all({'mean', 'low', 'high'} <= value.keys() for value in measures.values())


def test_a_run_is_evaluated_on_another_benchmark_and_stays_as_it_was(run, tmp_path, capsys):
  pytest.importorskip('math_verify')
  before = {path.name: path.read_bytes() for path in (run / 'eval').iterdir()}
  folder = tmp_path / 'MATH-500'
  lines(folder / 'test.jsonl', MATH_500)
  command = ['--mode=eval', f'--workdir={run}', f'--config.evaluation.benchmark={folder}']
  assert main.main(command) == 0
  out = capsys.readouterr().out
  table = [line.split()[:3] for line in out.splitlines()]
  assert [['MATH-500', '1', '2'], ['MATH-500', '2', '2']] == [
    x for x in table if x[:1] == ['MATH-500']
  ]
  assert ['all', '4', '0.0'] in table
  assert 'maj@k' in out and 'pass@k' in out
  record = record_of(run)
  assert record['grader']['fn'] == 'math_verify' and record['grader']['right'] == 1.0
  after = {path.name: path.read_bytes() for path in (run / 'eval').iterdir()}
  assert len(after) == len(before) + 1 and before.items() <= after.items()


def test_prompts_of_a_benchmark_are_never_dropped(run, tmp_path, capsys):
  long = [*GSM8K, dict(question='1+' * 20, answer='#### 20')]
  path = lines(tmp_path / 'test.jsonl', long)
  assert (
    main.main(['--mode=eval', f'--workdir={run}', f'--config.evaluation.benchmark={path}']) == 2
  )
  message = capsys.readouterr().err
  assert '1 of the 7 prompts of config.evaluation.benchmark=' in message
  assert 'are longer than config.prompt_tokens=12' in message
  assert 'raise it to 40.' in message
