"""The curriculum's report on handwritten files, and the report command on a real run."""

from __future__ import annotations

import io
import json
import os

import numpy as np
import pytest
import tiny_job
from curricula import make
from rich.console import Console

from jaxrl_llm import main, report
from jaxrl_llm.report import run_reader
from jaxrl_llm.types import Row, UserError

ROWS = tuple(Row(str(i), f'question {i}', (), str(i), 'made', {}) for i in range(40))


def rollouts(folder, step, **scores):
  os.makedirs(folder / 'rollouts', exist_ok=True)
  rows = [
    dict(step=step, prompt=int(name[1:]), score=score)
    for name, all_ in scores.items()
    for score in all_
  ]
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (folder / f'rollouts/step_{step:06d}.jsonl').write_text(text)


def read(folder):
  return report.Rollouts(str(folder)).refresh()


def test_a_visit_has_the_share_of_correct_rollouts_of_its_group(tmp_path):
  rollouts(tmp_path, 0, p3=[1, 0, 0, 0], p7=[0, 0.5, 0, 0])
  rollouts(tmp_path, 4, p3=[1, 1])
  steps, rates = report.success_of_visits(read(tmp_path))
  assert steps.tolist() == [0, 0, 4] and rates.tolist() == [0.25, 0, 1]
  with pytest.raises(UserError, match='has no rollouts'):
    report.summarize(str(tmp_path), make(40), ROWS, read(tmp_path / 'nothing'))


def test_the_report_shows_the_visits_and_the_posterior(tmp_path):
  curriculum = make(40, prior_pooling=dict(fn='none'), evidence_decay=dict(fn='none'))
  for _ in range(4):
    curriculum.observe(np.array([1, 2, 3]), np.array([0, 4, 8]), np.full(3, 8))
  rollouts(tmp_path, 0, p1=[0] * 8, p2=[1, 0] * 4)
  rollouts(tmp_path, 9, p3=[1] * 8)
  summary = report.summarize(str(tmp_path), curriculum, ROWS, read(tmp_path))
  assert summary.windows == [(0, 0), (9, 9)]
  np.testing.assert_allclose(summary.difficulty_WxD.sum(1), 1)
  assert summary.difficulty_WxD[0, 0] == 0.5 and summary.difficulty_WxD[1, -1] == 1
  assert summary.most[0]['prompt'] == 2 and summary.most[0]['visits'] == 4
  np.testing.assert_allclose(summary.most[0]['success'], 0.5, atol=0.01)
  assert {row['prompt'] for row in summary.least[:2]} == {1, 3}
  # Predictions before each visit: one half at first, then toward the observed rate.
  predicted, observed, counts = zip(*summary.reliability, strict=True)
  assert sum(counts) == 12 and predicted == tuple(sorted(predicted))
  assert observed[0] == 0 and observed[-1] == 1
  np.testing.assert_allclose(summary.prior_D.sum(), 1)


@pytest.mark.parametrize('width', [40, 60, 200])
def test_tables_fit_any_width_and_list_suspect_labels(width, tmp_path):
  rollouts(tmp_path, 0, p1=[0, 1], p2=[0, 0])
  rollouts(tmp_path, 123_456, p1=[0, 1], p2=[1, 1])
  suspect = dict(prompt=1, given='[/i]8', majority='7', share=0.75, visits=6, question='1 +\n6[/u]')
  (tmp_path / 'suspect_labels.jsonl').write_text(json.dumps(suspect) + '\n')
  out = io.StringIO()
  summary = report.summarize(str(tmp_path), make(40), ROWS, read(tmp_path))
  report.print_tables(summary, Console(file=out, width=width))
  text = out.getvalue()
  assert max(map(len, text.splitlines())) <= width
  assert 'Most learnable' in text and '75%' in text and 'calibration error' in text
  histograms = [report.sparkline(share_D) for share_D in summary.difficulty_WxD]
  assert all(sum(line in row for row in text.splitlines()) for line in histograms), (
    'a histogram is cut'
  )
  assert width < 60 or '[/i]8' in text and '1 + 6[/u]' in text, '[brackets] are no markup'
  (tmp_path / 'out.json').write_text(json.dumps(report.to_json(summary)))
  again = report.load_json(str(tmp_path / 'out.json'))
  assert again.suspects == [suspect] and report.to_json(again) == json.loads(
    json.dumps(report.to_json(summary))
  )


def test_every_share_above_zero_has_a_bar():
  assert report.sparkline(np.array([0, 1e-6, 0.5, 1])) == ' ▁▄█'


def test_the_command_reports_a_run_from_its_folder(tmp_path, capsys):
  changes = dict(steps=2, sft=dict(steps=20, learning_rate=3e-3, prompts=16))
  config = tiny_job.config_file(tmp_path, **changes, evaluation=dict(every=0, prompts=4, samples=0))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  flags = [f'--config={config}', f'--workdir={tmp_path / "run"}', '--mode=report']
  assert (tmp_path / 'run/report.html').exists(), 'the run writes its own report'
  assert main.main(flags) == 0
  assert 'Posterior mean of all prompts' in capsys.readouterr().out
  written = json.loads((tmp_path / 'run/curriculum.json').read_text())
  assert sum(row['visits'] for row in written['most']) > 0 and written['windows'][-1][1] == 1
  run = run_reader.read_run(str(tmp_path / 'run'))
  assert run['done'] == 2 and run['choices']['why']['picked'] > 0
  row = json.loads((tmp_path / 'run/rollouts/step_000001.jsonl').read_text().splitlines()[0])
  assert len(row['logp']) == row['length'] and sum(row['cuts']) == len(row['output'])
  assert row['right'] in (0, 1) and 'advantage' in row and 'coefficient' in row
