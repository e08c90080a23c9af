"""Another data source drops the fields of config.data that are about the rows of the former."""

from __future__ import annotations

from jaxrl_llm.config import loading as configs


def test_another_source_has_no_template_and_no_tasks_of_the_former(tmp_path):
  default = configs.default().data
  own_file = tmp_path / 'mine.py'
  own_file.write_text("def get_config():\n  return dict(base='dapo', data=dict(source='files'))\n")
  own = '--config.data.source=jsonl', '--config.data.path=rows.jsonl'
  for config in (configs.load('dapo', own), configs.load(str(own_file))):
    data = config.data
    assert data.template == default.template == '{question}' and data.tasks == default.tasks == ()
  # Typed before the source, it is that of the new rows; without another source, the job keeps its own.
  typed = configs.load('dapo', ['--config.data.template=Q {question}', *own]).data
  assert typed.template == 'Q {question}'
  sums = configs.load('dapo', ['--config.data.source=gym', '--config.data.seed=1']).data
  assert sums.template.startswith('State the final answer') and len(sums.tasks) == 4
