"""The console in a pipe, in a terminal and without UTF-8, with any numbers."""

from __future__ import annotations

import io
import json
import logging
import math
import re

import jax
import numpy as np
import pytest
from absl import logging as absl_logging
from rich.console import Console as Rich
from rich.text import Text

from jaxrl_llm.monitoring import ascii_plot, console

ROW = {
  'critic/score/mean': 0.25,
  'curriculum/observed_success': 0.5,
  'curriculum/mixed_share': 0.75,
  'response_length/mean': 12.3,
  'actor/entropy': 1.88,
  'actor/lr': 1e-5,
  'timing_s/gen_update': 11.24,
  'timing_s/grade': 0.13,
}
EVALUATION = {'val-core/all/acc/greedy': 0.2, 'val-core/[b]sums[/b]/acc/mean@4': 0.105}


def row(step: int, **more) -> dict:
  return ROW | {'training/global_step': step} | more


class Pipe(io.TextIOWrapper):
  """A text file in memory."""

  def __init__(self, encoding: str = 'utf-8', terminal: bool = False):
    super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
    self._terminal = terminal

  def isatty(self) -> bool:
    return self._terminal

  def text(self) -> str:
    return self.buffer.getvalue().decode(self.encoding)


def output_of(actions, *, steps: int = 75, encoding: str = 'utf-8', terminal: bool = False) -> str:
  pipe = Pipe(encoding, terminal)
  out = Rich(file=pipe, force_terminal=terminal, width=120, legacy_windows=False)
  with console.Console(steps, out) as screen:
    actions(screen)
  return pipe.text()


def whole_run(screen) -> None:
  steps_of_a_run(screen)
  screen.finish('runs/x')


def steps_of_a_run(screen) -> None:
  screen.banner(model='m', work_dir='runs/x')
  screen.compiling()
  screen.evaluation(0, EVALUATION)
  for step in range(75):
    screen.step(row(step, **{'critic/score/mean': step / 75}))
  screen.warn('careful')
  screen.evaluation(75, {k: v * 2 for k, v in EVALUATION.items()})


def test_a_pipe_gets_one_short_line_per_step():
  lines = output_of(whole_run).splitlines()
  steps = [x for x in lines if re.search(r' s  step \d+/75', x)]
  assert len(steps) == 75 and max(map(len, lines)) <= 120
  assert 'step 1/75  reward 0.00  success 50%  mixed 75%  tokens 12.3  entropy 1.88' in steps[0]
  assert '  time 11.2+0.1 s  lr 1e-05' in steps[0] and 'left' not in steps[0]
  assert re.search(r'step 40/75 \(\d+ s left\)', steps[39]) and 'left' not in steps[-1]
  assert '\x1b' not in ''.join(lines)


def test_a_step_without_an_update_shows_no_metrics_of_it():
  step_output = lambda **more: output_of(lambda screen: screen.step(row(0, **more)))  # noqa: E731
  assert 'entropy 1.88' in step_output(**{'training/trained_tokens': 8.0})
  idle = step_output(**{'training/trained_tokens': 0.0})
  assert 'entropy' not in idle and 'reward 0.25' in idle
  taught = step_output(**{'training/trained_tokens': 0.0, 'training/demonstration_tokens': 8.0})
  assert 'entropy' not in taught and 'lr 1e-05' in taught and 'lr' not in idle


def test_lines_stay_short_for_huge_numbers():
  huge = {name: -1.23456e15 for name in ROW} | {'training/global_step': 10**9}
  (line,) = output_of(lambda s: s.step(huge), steps=2 * 10**9).splitlines()
  assert len(line) <= 120 and 'reward -1234560000000000.00' in line


def test_every_event_is_printed():
  text = output_of(whole_run)
  assert 'jaxrl_llm\n  model     m\n  work dir  runs/x\n' in text
  assert 'compiling the step ...' in text and 'warning: careful' in text
  assert 'held-out at step 0:  greedy 20.0%' in text
  assert 'reward: 0 -> 0.98 over 75 steps' in text and 'everything is in runs/x' in text
  table = text[text.index('held-out accuracy') :]
  assert 'after 75 steps' in table
  assert re.search(r'all\W+greedy\W+20.0%\W+40.0%\W+20.0', table)
  assert re.search(r'\[b\]sums\[/b\]\W+mean@4\W+10.5%\W+21.0%\W+10.5', table)


def test_a_terminal_gets_a_live_table():
  text = output_of(whole_run, terminal=True)
  plain = re.sub(r'\x1b\[[\d;?]*[a-zA-Z]', '', text)
  assert '\x1b[' in text and 'step 75/75' in plain and 'compiling the step' in plain
  for name in ('reward', 'success', 'mixed', 'tokens', 'entropy', 'time', 'lr'):
    assert f'{name} ' in plain
  assert 'warnings: 1, the last: careful' in plain
  assert ' s  step 1/75' not in plain  # no lines per step in addition to the table
  assert text.rstrip().endswith('everything is in runs/x')


def test_logged_warnings_go_through_the_live_table():
  logger = logging.getLogger('absl')
  before = (logger.propagate, list(logger.handlers))
  text = output_of(lambda _: absl_logging.warning('row %d is [bold]', 3), terminal=True)
  assert 'warning: row 3 is [bold]' in text
  assert (logger.propagate, list(logger.handlers)) == before
  with pytest.raises(KeyError):
    output_of(lambda _: {}['x'], terminal=True)
  assert (logger.propagate, list(logger.handlers)) == before


def test_output_is_ascii_without_utf8():
  def with_arrow(screen):
    whole_run(screen)
    screen.info('loss 1 → 2')

  for terminal in (False, True):
    text = output_of(with_arrow, encoding='ascii', terminal=terminal)
    assert text.isascii() and 'loss 1 ? 2' in text and '#' in text


@pytest.mark.parametrize('terminal', [False, True])
def test_odd_numbers_raise_no_error(terminal):
  def odd(screen):
    screen.step({'training/global_step': 0})
    screen.step(row(1, **{'critic/score/mean': math.nan, 'actor/entropy': None}))
    screen.step(row(2, **{'critic/score/mean': math.inf, 'actor/lr': -math.inf}))
    screen.step(row(3, **{'critic/score/mean': -2.0}))
    screen.evaluation(0, {'val-core/all/acc/greedy': None, 'other': 1.0})
    screen.evaluation(3, {'val-core/all/acc/greedy': 0.5, 'other': math.nan})
    screen.finish('x')

  assert 'everything is in x' in output_of(odd, terminal=terminal)
  assert 'everything is in x' in output_of(lambda s: s.finish('x'), terminal=terminal)


def test_the_curve_of_a_resumed_run_includes_the_earlier_steps():
  def resumed(screen):
    screen.history([row(s, **{'critic/score/mean': 0.0}) for s in range(10)])
    screen.step(row(10, **{'critic/score/mean': 1.0}))
    screen.finish('x')

  assert 'reward: 0 -> 1 over 11 steps' in output_of(resumed)


def test_time_left_counts_from_the_second_step(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(console.time, 'monotonic', lambda: now[0])

  def run(screen):
    for step, taken in ((20, 500.0), (21, 100.0), (22, 300.0)):
      now[0] += taken
      screen.step(row(step))

  lines = output_of(run, steps=33).splitlines()
  assert [re.findall(r'\((.*?)\)', x) for x in lines] == [[], ['18 min left'], ['33 min left']]


@pytest.mark.parametrize(
  'seconds, text', [(3.4, '3 s'), (89, '89 s'), (600, '10 min'), (9000, '2.5 h')]
)
def test_durations_have_the_unit_that_fits(seconds, text):
  assert ascii_plot.duration(seconds) == text


def test_only_the_first_process_prints(monkeypatch, capsys):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  with console.Console(3) as screen:
    whole_run(screen)
  assert capsys.readouterr().out == ''
  monkeypatch.setattr(jax, 'process_index', lambda: 0)
  with console.Console(3) as screen:
    whole_run(screen)
  lines = capsys.readouterr().out.splitlines()
  assert len([x for x in lines if ' s  step ' in x]) == 75 and max(map(len, lines)) <= 120


def test_a_curve_shows_means_over_equal_ranges():
  text = ascii_plot.curve([0, 0, 1, 3, 4, 4], 'r', width=3, height=2)
  assert text.splitlines() == [
    'r: 0 -> 4 over 6 steps',
    '        4 |  █',
    '        0 |▁██',
  ]
  assert ascii_plot.curve([1.0, math.nan, None, 1.0], 'r').startswith('r: 1 -> 1 over 4 steps')
  assert ascii_plot.curve([1.0], 'r').startswith('r: 1 -> 1 over 1 step\n')
  assert ascii_plot.curve([None], 'r') == 'r: nothing to show'
  assert ascii_plot.curve([0, 1, 2, 3], 'r', height=1, ascii_only=True).endswith('0 |..:#')


def test_a_curve_fits_its_width():
  lines = ascii_plot.curve(
    [math.sin(i / 50) for i in range(1000)], 'r', width=40, height=5
  ).splitlines()
  assert len(lines) == 6 and max(map(len, lines)) == len('          |') + 40


def test_a_sparkline_has_the_scale_of_its_values_or_a_fixed_one():
  assert ascii_plot.sparkline([0.0, 0.005, 0.01]) == '▁▅█' == ascii_plot.sparkline([-1.0, 1.0, 3.0])
  assert ascii_plot.sparkline([0.5] * 3) == '▁▁▁'
  assert ascii_plot.sparkline([0.0, 0.5, 1.0, 9.0], scale=(0.0, 1.0)) == '▁▅██'
  assert (
    ascii_plot.sparkline([]) == '' and len(ascii_plot.sparkline(list(range(99)), width=10)) == 10
  )


def test_the_live_reward_line_names_its_scale():
  out = terminal_of(60)
  with console.Console(75, out) as screen:
    for step in range(40):
      screen.step(row(step, **{'critic/score/mean': 0.01 + step / 4000}))
    (line,) = (x.plain for x in screen._lines() if x.plain.startswith('reward 0.01'))
  assert line.startswith('reward 0.01 ▁▁') and line.endswith('█ 0.0198') and len(line) <= 60
  assert ascii_plot.scaled_sparkline([0.5], 20) == ('0.5 ', '▁', ' 0.5')
  assert ascii_plot.scaled_sparkline([0.5, 0.25], 3) == ('', '█▁', '')
  assert ascii_plot.scaled_sparkline([], 9) == ('', '', '')


def table_of(before: dict, after: dict) -> list[list[str]]:
  out = Rich(file=io.StringIO(), width=100)
  out.print(ascii_plot.before_after(before, after, 60))
  lines = [x for x in out.file.getvalue().splitlines() if '%' in x or ' -' in x]
  return [re.findall(r'[^│\s]+', line)[:2] for line in lines]


def test_the_final_table_has_a_row_per_measure():
  """A single source repeats the values of all data, and best@n those of pass@n for scores of 0 and 1."""
  measures = {'mean@4': 0.1, 'greedy': 0.2, 'maj@4': 0.3, 'best@4': 0.4, 'pass@4': 0.4}
  before = {f'val-core/{s}/acc/{m}': v for s in ('all', 'gym/sum') for m, v in measures.items()}
  after = {name: value + 0.1 for name, value in before.items()}
  rows = [['all', name] for name in ('greedy', 'mean@4', 'pass@4', 'maj@4')]
  assert table_of(before, after) == rows
  before['val-core/gym/sum/acc/greedy'] = 0.1
  assert table_of(before, after) == [*rows, ['gym/sum', 'greedy']]
  after['val-core/all/acc/best@4'] = 0.9  # graded scores
  assert ['all', 'best@4'] in table_of(before, after)


def test_before_and_after_without_a_step():
  out = Rich(file=io.StringIO(), width=100)
  out.print(
    ascii_plot.before_after({'val-core/a/acc/greedy': 0.5}, {'val-core/a/acc/greedy': 0.25})
  )
  text = out.file.getvalue()
  assert '-25.0' in text and 'after' in text and 'steps' not in text


def test_the_difficulty_is_computed_for_a_live_table_only():
  calls = []

  def shares():
    calls.append(1)
    return [0.7, 0.2, 0.1]

  live = output_of(lambda screen: screen.step(row(0), shares), terminal=True)
  assert 'prompts' in live and 'hard' in live and '█▃▂' in live and calls == [1]
  assert 'hard' not in output_of(lambda screen: screen.step(row(0), shares)) and calls == [1]


def test_plain_lines_in_a_terminal_on_request():
  pipe = Pipe(terminal=True)
  out = Rich(file=pipe, force_terminal=True, width=120, legacy_windows=False)
  with console.Console(3, out, live=False) as screen:
    for step in range(3):
      screen.step(row(step))
  assert 'step 3/3' in pipe.text() and '\x1b[2K' not in pipe.text()  # nothing is redrawn


def test_quiet_prints_only_warnings():
  pipe, warnings = Pipe(), Pipe()
  out = Rich(file=pipe, quiet=True), Rich(file=warnings)
  with console.Console(75, out[0], warnings_out=out[1]) as screen:
    whole_run(screen)
    screen.warn('the disk is slow')
  assert pipe.text() == '' and 'warning: the disk is slow' in warnings.text()
  assert 'step' not in warnings.text()


def test_the_last_compile_time_is_printed():
  text = output_of(lambda screen: screen.compiling('the step', 83.4))
  assert 'compiling the step ... (it took 83 s the last time)' in text
  assert '(' not in output_of(lambda screen: screen.compiling())


def test_json_output_is_one_object_per_line():
  pipe = Pipe()
  with console.JsonConsole(2, pipe) as screen:
    screen.banner(model='m')
    screen.compiling('the step', 2.0)
    screen.evaluation(0, EVALUATION)
    screen.step(row(0, bad=float('nan'), array=np.float32(0.5)))
    screen.warn('slow')
    screen.finish('runs/x')
  lines = [json.loads(line) for line in pipe.text().splitlines()]
  events = ['banner', 'compiling', 'evaluation', 'step', 'warning', 'finished']
  assert [line['event'] for line in lines] == events
  assert lines[3]['critic/score/mean'] == 0.25 and lines[3]['array'] == 0.5
  assert lines[3]['bad'] is None and lines[1]['last_s'] == 2.0 and lines[5]['folder'] == 'runs/x'


@pytest.mark.parametrize('kind', console.KINDS)
def test_every_kind_of_console_takes_a_run(kind, capsys):
  with console.open_console(kind, 75) as screen:
    whole_run(screen)
    screen.warn('slow')
  out, err = capsys.readouterr()
  assert ('slow' in err) == (kind == 'quiet') and (out == '') == (kind == 'quiet')


def terminal_of(width: int, height: int = 50, **options) -> Rich:
  options = dict(force_terminal=True, legacy_windows=False) | options
  return Rich(file=Pipe(terminal=True), width=width, height=height, **options)


FULL = ROW | {
  'perf/throughput': 12345.0,
  'actor/grad_norm': 1.25,
  'curriculum/predicted_success': 0.61,
  'training/rollout_probs_diff_max': 3e-6,
  'timing_s/choose': 0.008,
  'perf/device_memory_gib': 12.3,
  'perf/host_memory_gib': 3.4,
}
METRICS = (
  'reward 0.25|success 50%|mixed 75%|tokens 12.3|entropy 1.88|time 11.2+0.1 s|tokens/s 12,345|lr 1e-05|grad 1.25|'
  'predicted 61%|prob gap 3e-06|choose 8 ms|device 12.3 GiB|host 3.4 GiB'
).split('|')


def plain_lines(out: Rich) -> list[str]:
  """The output without colors and cursor movements."""
  return re.sub(r'\x1b\[[\d;?]*[a-zA-Z]', '', out.file.text()).replace('\r', '\n').splitlines()


@pytest.mark.parametrize('width', [40, 80, 200])
def test_lines_fit_every_width_and_show_every_metric(width):
  out, named = terminal_of(width), 'val-core/a long name of a source/acc/best@4'
  with console.Console(75, out) as screen:
    steps_of_a_run(screen)
    screen.step(FULL | {'training/global_step': 74}, lambda: [0.7, 0.2, 0.1])
    screen.evaluation(0, EVALUATION | {named: 0.5})
    screen.evaluation(75, EVALUATION | {named: 0.75})
    table = [line.plain for line in screen._lines()]
    screen.finish('runs/x')
  assert max(map(len, plain_lines(out))) <= width and '…' not in out.file.text()
  assert max(map(len, table)) <= width and any('prompts hard █▃▂ easy' in x for x in table)
  assert all(any(metric in line for line in table) for metric in METRICS)
  text = '\n'.join(plain_lines(out))
  for part in ('greedy 20.0%', 'a long name of a source', '50.0%', '75.0%', '+25.0', 'step 75/75'):
    assert part in text
  assert (len(table) <= 8) == (width > 40)  # wide terminals need fewer lines


@pytest.mark.parametrize('height', [3, 6, 12])
def test_a_low_window_shows_the_bar_the_status_and_the_first_metrics(height):
  out = terminal_of(80, height)
  with console.Console(75, out) as screen:
    screen.warn('careful')
    screen.step(FULL | {'training/global_step': 74})
    screen.compiling()
    table = [line.plain for line in screen._lines()]
  assert len(table) < height
  assert table[0].startswith('step 75/75') and table[1 if height < 5 else -2].startswith(
    'compiling'
  )
  assert ('reward 0.25' in ''.join(table)) == (height > 5)


def test_columns_stay_in_place_from_step_to_step():
  out = terminal_of(80)
  with console.Console(75, out) as screen:
    screen.step(FULL | {'training/global_step': 0, 'perf/throughput': 123456.0})
    wide = [line.plain.find('mixed') for line in screen._lines()]
    screen.step(FULL | {'training/global_step': 1, 'perf/throughput': 7.0})
    assert wide == [line.plain.find('mixed') for line in screen._lines()] and max(wide) > 0


def test_a_narrowed_window_has_no_remnants():
  """A terminal that wraps its lines again when it shrinks: 20 columns cut each line of 30 into two."""
  out = terminal_of(40)
  lines = [Text('a' * 30), Text('b' * 30)]
  live = console._Live(lambda: lines, out)
  live.start(refresh=True)
  before = len(out.file.text())
  out.width = 20
  live.refresh()
  up = out.file.text()[before:].count('\x1b[1A')
  assert up == 3  # one for the second line, and one for each wrapped line
  before = len(out.file.text())
  live.refresh()
  assert out.file.text()[before:].count('\x1b[1A') == 1
  live.stop()


def test_lines_break_between_metrics_and_never_within_paths():
  text = 'held-out at step 0: greedy 50.0%  mean@2 31.2%  best@2 37.5%'
  assert ascii_plot.wrap_lines(text, 45, '   1 s  ', '        ') == [
    '   1 s  held-out at step 0: greedy 50.0%',
    '        mean@2 31.2%  best@2 37.5%',
  ]
  path = '/a/very/long/path/that/has/no/room'
  assert ascii_plot.wrap_lines(f'all is in {path}', 20) == ['all is in', path]
  assert ascii_plot.wrap_lines('  a  1\n  b  2', 20) == ['  a  1', '  b  2']
  assert ascii_plot.wrap_lines('漢字漢字 漢字漢字', 10) == [
    '漢字漢字',
    '漢字漢字',
  ]  # two columns each
  assert ascii_plot.wrap_lines('', 10) == ['']


def test_a_dumb_terminal_gets_plain_lines():
  out = terminal_of(80, _environ={'TERM': 'dumb'})
  with console.Console(75, out) as screen:
    whole_run(screen)
  lines = plain_lines(out)
  assert len([x for x in lines if ' s  step ' in x]) == 75 and '\x1b[1A' not in out.file.text()


def test_no_color_disables_colors():
  out = terminal_of(80, no_color=True)
  with console.Console(75, out) as screen:
    whole_run(screen)
  assert not re.search(r'\x1b\[[\d;]*3[0-7]m', out.file.text())


@pytest.mark.parametrize('width', [40, 80])
def test_ascii_terminals_of_any_width_get_ascii(width):
  out = Rich(file=Pipe('ascii', True), force_terminal=True, width=width, legacy_windows=False)
  with console.Console(75, out) as screen:
    steps_of_a_run(screen)
    screen.warn('naïve → wrong')
    screen.evaluation(0, {'val-core/größe/acc/greedy': 0.1})
    screen.evaluation(75, {'val-core/größe/acc/greedy': 0.2})
    screen.finish('x')
  assert 'gr??e' in out.file.text() and 'na?ve ? wrong' in out.file.text()


@pytest.mark.parametrize('jupyter, terminal', [(True, False), (True, True), (False, False)])
def test_notebooks_and_logs_with_forced_colors_get_plain_text(monkeypatch, jupyter, terminal):
  stdout = Pipe(terminal=terminal)
  monkeypatch.setenv('FORCE_COLOR', '1')  # as IPython's kernel sets it
  monkeypatch.setattr('rich.console._is_jupyter', lambda: jupyter)
  monkeypatch.setattr('sys.stdout', stdout)
  with console.Console(75) as screen:
    whole_run(screen)
  assert len([x for x in stdout.text().splitlines() if ' s  step ' in x]) == 75
  assert '\x1b' not in stdout.text()


@pytest.mark.parametrize(
  'parts, text', [((11.24, 0.13), '11.2+0.1 s'), ((0.021, 0.0043), '21+4 ms'), ((0.5,), '500 ms')]
)
def test_parts_of_a_step_have_a_common_unit(parts, text):
  assert ascii_plot.seconds(*parts) == text
