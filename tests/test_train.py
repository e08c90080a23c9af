"""The whole job as a user runs it: killed, resumed, on other devices, and given bad input."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiers
import tiny_job

from jaxrl_llm import main
from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.report import run_reader

# Two tokens a row in each step, in half as many slots as rows: most groups take several steps. Few
# prompts, so that most come back and begin from their last answers.
PARTIAL = dict(
  **tiny_job.UNTAUGHT,
  rollout=dict(slots=8, stop=dict(fn='rounds', count=3), draft=dict(fn='lenient', lenience=1.0)),
  data=tiny_job.CONFIG['data'] | dict(size=24),
  optimizer=dict(learning_rate=1e-2),  # tells two versions of the weights apart
)

# Graded while the next step runs; and half of all rollouts pruned by a judge that is part of the state.
LAG = dict(
  mode='lag',
  rollout=dict(
    pruning=dict(fn='quality', candidates=8, at_tokens=2, warmup_steps=2, learning_rate=1e-2)
  ),
  optimizer=dict(learning_rate=3e-3),
)

# Three batches are graded at once, while unfinished groups go on in the next step.
LAGS = PARTIAL | dict(mode='lag', lag_steps=3, checkpoint=dict(every=3, keep=2))

# A prior that reads hidden states, with a step in flight.
HIDDEN = dict(
  steps=6,
  mode='lag',
  checkpoint=dict(every=3, keep=2),
  curriculum=dict(
    candidates=dict(fn='encoded'),
    prior_pooling=dict(fn='hidden_state', dimensions=3, multiple=1, answer_tokens=4, considered=3),
  ),
  evaluation=dict(every=0, prompts=8, samples=0),
)

# Rewards by vote, outliers cut, and successes of earlier visits in every group.
AGAIN = dict(
  steps=5,
  rewards=dict(
    vote=dict(fn='majority', learn_from=0),
    truncate=dict(fn='outliers', deviations=1.0, least_tokens=1),
  ),
  replay=dict(reuse=dict(fn='successes', count=2)),
  data=tiny_job.CONFIG['data'] | dict(size=8),
  evaluation=dict(every=0, prompts=8, samples=0),
  optimizer=dict(learning_rate=3e-3),  # tells two versions of the weights apart
)

# Half of every batch are mixed groups of earlier steps; graded while the next step runs, so that both are saved.
REPLAYED = dict(
  **tiny_job.UNTAUGHT,
  mode='lag',
  replay=dict(reuse=dict(fn='mixed_groups', share=0.5, max_age=3)),
  objective=dict(importance_correction=dict(fn='token')),
  evaluation=dict(every=0, prompts=8, samples=0),
  optimizer=dict(learning_rate=1e-2),  # tells two versions of the weights apart
)

# Batches wait for mixed groups, and hard prompts get a second slot in a later call.
WAITING = dict(
  **tiny_job.UNTAUGHT,
  steps=9,
  replay=dict(collect=dict(fn='dars', top_ups=2, most=2, patience=4)),
  evaluation=dict(every=0, prompts=8, samples=0),
  optimizer=dict(learning_rate=3e-3),
)

# Long strings after a short warm start: most prompts fail and are asked again behind a part of their answer.
HINTED = dict(
  steps=8,
  curriculum=dict(hint=dict(fn='prefix', start=0.6, plain=0.0)),
  replay=dict(collect=dict(fn='mixed', patience=2)),
  prompt_tokens=20,
  sft=dict(steps=5, learning_rate=3e-3, prompts=16),
  data=dict(
    source='digits', size=6, chat=False, tasks=[dict(name='rev', min_length=4, max_length=5)]
  ),
  evaluation=dict(every=0, prompts=4, samples=0),
  optimizer=dict(learning_rate=3e-3),
)
# A reply of any form is a hint.
WRITTEN = tiny_job.UNTAUGHT | dict(
  rollouts=2,
  curriculum=dict(
    hint=dict(fn='written', hints=2, tag='', instruction='{question}{attempt}{solution}')
  ),
  prompt_tokens=32,
)


# Strings that are sometimes solved. Failures are seen with the answer, and successes are injected into later failures.
INJECTED = HINTED | dict(
  prompt_tokens=50,
  curriculum=dict(hint=dict(fn='self_rolled')),
  replay=dict(reuse=dict(fn='cached')),
  sft=dict(steps=60, learning_rate=3e-3, prompts=16),
  data=dict(
    source='digits', size=6, chat=False, tasks=[dict(name='rev', min_length=3, max_length=4)]
  ),
)

# The same strings. Failures wait for the next step, which goes on from their last right character.
CORRECTED = INJECTED | dict(
  curriculum=dict(hint=dict(fn='corrected', part='matching_start', guided=False)),
  replay=dict(reuse=dict(fn='none')),
  rewards=dict(parts=(dict(fn='matching_start', weight=0.0),)),
)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  folder = tmp_path_factory.mktemp('uninterrupted')
  flags = '--config.monitoring.trackers=("tensorboard",)', '--config.monitoring.profile.steps=4:6'
  out = tiny_job.command(tiny_job.config_file(folder), folder / 'run', *flags)
  return folder / 'run', out


@pytest.fixture(scope='module')
def partial(tmp_path_factory):
  folder = tmp_path_factory.mktemp('partial')
  tiny_job.finish(tiny_job.start(tiny_job.config_file(folder, **PARTIAL), folder / 'run'))
  return folder / 'run'


@pytest.fixture(scope='module')
def lag(tmp_path_factory):
  folder = tmp_path_factory.mktemp('lag')
  tiny_job.finish(tiny_job.start(tiny_job.config_file(folder, **LAG), folder / 'run'))
  return folder / 'run'


@pytest.fixture(scope='module')
def lags(tmp_path_factory):
  folder = tmp_path_factory.mktemp('lags')
  tiny_job.finish(tiny_job.start(tiny_job.config_file(folder, **LAGS), folder / 'run'))
  return folder / 'run'


@pytest.fixture(scope='module')
def replayed(tmp_path_factory):
  folder = tmp_path_factory.mktemp('replayed')
  tiny_job.finish(tiny_job.start(tiny_job.config_file(folder, **REPLAYED), folder / 'run'))
  return folder / 'run'


def test_a_run_leaves_its_folder_and_says_what_it_gained(uninterrupted):
  run, out = uninterrupted
  assert [r['training/global_step'] for r in tiny_job.rows(run)] == list(range(10))
  assert len(os.listdir(run / 'rollouts')) == 10 and len(os.listdir(run / 'checkpoints')) == 2
  assert sorted(os.listdir(run / 'eval')) == ['step_000000.json', 'step_000010.json']
  rollout = json.loads((run / 'rollouts/step_000003.jsonl').read_text().splitlines()[0])
  assert {'input', 'output', 'gts', 'score', 'step', 'reason'} <= set(rollout)
  assert 'held-out accuracy' in out and 'after 10 steps' in out and 'step 10/10' in out
  gaps = [r['training/rollout_probs_diff_max'] for r in tiny_job.rows(run)]
  assert max(gaps) <= 1e-4
  told = evaluation(run, 10)
  assert told['step'] == 10 and told['grader']['fn'] == 'exact' and len(told['rows']) == 2 * 8
  levels = [(g['source'], g['level']) for g in told['groups']]
  assert levels[:2] == [('all', ''), ('digits/copy', '')] and len(levels) == 4
  assert {level for _, level in levels[2:]} == {'length=1', 'length=2'}
  names = ('greedy', 'mean@2', 'best@2', 'pass@2', 'maj@2')
  assert set(told['metrics']) == {
    f'val-core/{s}/acc/{n}' for s in ('digits/copy', 'all') for n in names
  }
  assert told['groups'][0]['curves']['maj']['k'] == [1, 2]


def evaluation(run, step: int) -> dict:
  return json.loads((run / f'eval/step_{step:06d}.json').read_text())


def test_an_exported_model_is_evaluated_as_its_run_was(uninterrupted, tmp_path, capsys):
  """The same weights from a Hugging Face folder, in a new workdir: the same answers, so that nothing differs."""
  run, model = uninterrupted[0], tmp_path / 'model'
  config = f'--config={run.parent}/config.py'
  assert (
    main.main([config, f'--workdir={run}', '--mode=export', f'--to={model}', '--dtype=float32'])
    == 0
  )
  argv = [config, f'--workdir={tmp_path}/new', '--mode=eval', f'--config.model={model}']
  argv.append('--config.sft.steps=0')  # it has been taught
  assert main.main([*argv, f'--against={run}/eval/step_000010.json']) == 0
  out = capsys.readouterr().out
  here, there = evaluation(tmp_path / 'new', 0), evaluation(run, 10)
  assert here['rows'] == there['rows'] and here['groups'] == there['groups']
  lines = [line.split() for line in out.splitlines()]
  assert [x[-1] for x in lines if x[:1] == ['all'] and x[1].startswith(('greedy', 'pass@'))] == [
    '1'
  ] * 3
  assert f'model: scratch -> {model}; step: 10 -> 0' in out
  # What was learned is a difference; and a run is evaluated at a step by name.
  argv = [config, f'--workdir={run}', '--mode=eval', f'--against={run}/eval/step_000000.json']
  assert 'there are: [10, 8].' in told(capsys, *argv, '--step=4')
  fresh = argv[:1] + [f'--workdir={tmp_path}/fresh'] + argv[2:]
  assert "another grader (fn: 'exact' there" in told(capsys, *fresh, '--config.rewards.fn=number')
  assert 'of 8 there and 4 here 4 are' in told(capsys, *fresh, '--config.evaluation.prompts=4')
  assert not (tmp_path / 'fresh').exists()
  assert main.main([*argv, '--step=8']) == 0
  assert 'other than there: step: 0 -> 8' in capsys.readouterr().out
  assert evaluation(run, 8)['rows'] != there['rows']


def test_trackers_and_the_trace_of_some_steps_lie_in_the_folder(uninterrupted):
  reader = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
  run, out = uninterrupted
  found = reader.EventAccumulator(str(run / 'tensorboard'))
  found.Reload()
  for name in ('critic/score/mean', 'actor/entropy', 'timing_s/grade'):
    want = [
      (r['training/global_step'], np.float32(r[name]))
      for r in metrics_log.read(str(run / 'metrics.jsonl'))
    ]
    assert [(e.step, np.float32(e.value)) for e in found.Scalars(name)] == want
  accuracy = found.Scalars('val-core/all/acc/greedy')
  assert [e.step for e in accuracy] == [0, 10]
  assert 'tracing steps 4 to 5' in out and 'the trace is in' in out
  told = run_reader.read_run(str(run))['device']
  assert told['steps'] == [4, 5] and told['devices'] == 1 and not told['chip_known']
  assert set(told['parts']['update']) >= {'attention', 'head', 'optimizer', 'matrix products'}
  assert set(told['parts']['generate']) >= {'attention', 'head', 'sampling', 'matrix products'}
  assert [one['part'] for one in told['roofline']] == ['update', 'generate']
  beside = run_reader.read_run(str(run))['time']['other_phases']
  assert set(beside) == {'warm start', 'compilation', 'evaluation', 'checkpoints'}


@pytest.mark.parametrize('devices', [1, 8])
def test_unfinished_groups_go_on_and_are_learned_from_once_whole(devices, tmp_path, request):
  run = tmp_path / 'run'
  if devices == 1:
    run = request.getfixturevalue('partial')
  else:  # every shard has its own queue, so that others are unfinished than on one device
    mesh = dict(data=2, fsdp=2, tensor=2)
    config = tiny_job.config_file(tmp_path, **PARTIAL, mesh=mesh)
    tiny_job.finish(tiny_job.start(config, run, devices=devices))
  rows = tiny_job.rows(run)
  assert max(r['generate/rounds'] for r in rows) == 3
  held = [r['generate/unfinished_groups'] for r in rows]
  assert max(held) > 0 and sum(r['perf/rollouts'] for r in rows) > 16
  for before, after in zip(rows, rows[1:], strict=False):
    assert after['training/batch_tokens'] == before['response_length/sum']
  assert max(r['generate/draft_tokens_kept'] for r in rows) > 4
  # What several weights wrote is off-policy, and the recorded log-probabilities know it.
  assert max(r['actor/ppo_kl'] for r in rows) > 1e-5


def test_lagging_learns_every_batch_one_update_late_and_knows_it(lag):
  rows = tiny_job.rows(lag)
  assert [r['training/global_step'] for r in rows] == list(range(10))
  learned = [r['training/batch_tokens'] for r in rows]
  assert learned[:2] == [0, 0] and min(learned[2:]) > 0
  assert learned[2:] == [r['response_length/sum'] for r in rows[:-2]]
  # One update lies between: off-policy, and corrected by the recorded log-probabilities.
  assert max(r['training/rollout_probs_diff_max'] for r in rows[3:]) > 1e-3
  assert all(r['generate/tokens'] > r['response_length/sum'] for r in rows)


def test_a_lag_of_several_steps_learns_every_batch_so_many_updates_late(lags):
  rows = tiny_job.rows(lags)
  assert [r['training/global_step'] for r in rows] == list(range(10))
  learned = [r['training/batch_tokens'] for r in rows]
  assert not any(learned[:4]) and max(learned[4:]) > 0
  assert learned[4:] == [r['response_length/sum'] for r in rows[:-4]]
  assert max(r['generate/unfinished_groups'] for r in rows) > 0


def test_with_a_lag_of_several_steps_they_are_graded_at_the_same_time(tmp_path):
  """Each call waits until that of another step has begun; one after the other, all would time out."""
  rule = dict(fn='judges:together', batched='step', workers=2, deadline_s=120.0, cpu_s=120.0)
  small = dict(steps=4, sft=None, rewards=rule, evaluation=dict(every=0, prompts=0, samples=0))
  config = tiny_job.config_file(tmp_path, mode='lag', lag_steps=2, **small)
  (tmp_path / 'begun').mkdir()
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', JUDGES=str(tmp_path / 'begun')))
  rows = tiny_job.rows(tmp_path / 'run')
  assert [r['grade/timeouts'] for r in rows] == [0] * 4
  assert all(r['critic/score/mean'] == 1 for r in rows)


def test_the_judge_of_pruned_runs_weighs_the_votes_of_evaluation(lag):
  before, after = (evaluation(lag, step) for step in (0, 10))
  assert before['groups'][0]['curves']['vote'] == before['groups'][0]['curves']['maj']
  sampled = [row for row in after['rows'] if row['kind'] == 'sampled']
  for row in sampled:  # who says the same was seen in the same state
    assert len(set(zip(row['output'], row['trust'], strict=True))) == len(set(row['output']))
  values = {p for row in sampled for p in row['trust']}
  assert len(values) > 2 and 0 < min(values) and max(values) < 1
  assert {row['trust'][0] for row in before['rows'] if row['kind'] == 'sampled'} == {0.5}
  assert 'val-core/all/acc/vote@2' in after['metrics']


def test_two_programs_are_the_one(uninterrupted, tmp_path):
  config = tiny_job.config_file(tmp_path, mode='split', steps=6)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  for one, two in zip(
    tiny_job.rows(uninterrupted[0]), tiny_job.rows(tmp_path / 'run'), strict=False
  ):
    for name in one:
      np.testing.assert_allclose(two[name], one[name], atol=1e-6, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize('kind', ['partial', 'lag', 'lags', 'replayed'])
def test_killed_at_random_moments_and_started_again_it_is_the_uninterrupted_run(
  kind, tmp_path, request
):
  """SIGKILL, then to the end: every metric of every step equal. test_faults.py has the plain job."""
  want = request.getfixturevalue(kind)
  changes = dict(partial=PARTIAL, lag=LAG, lags=LAGS, replayed=REPLAYED)[kind]
  draw, run = random.Random(0), tmp_path / 'run'
  config = tiny_job.config_file(tmp_path, **changes)
  for _ in range(min(tiers.REPEATS, 3)):
    process = tiny_job.start(config, run)
    aim = draw.randrange(1, 9)
    while process.poll() is None and not (run / f'rollouts/step_{aim:06d}.jsonl').exists():
      time.sleep(0.02)
    time.sleep(draw.random() * 0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
  tiny_job.finish(tiny_job.start(config, run))
  assert tiny_job.rows(run) == tiny_job.rows(want)
  files = [f'eval/step_{n:06d}.json' for n in (0, 10)]
  files += ['choices.jsonl', *(f'rollouts/step_{n:06d}.jsonl' for n in range(10))]
  for name in files:
    assert (run / name).read_text() == (want / name).read_text()


def test_half_of_a_batch_is_replayed_and_only_the_other_half_sampled(replayed):
  rows = tiny_job.rows(replayed)
  # Graded one step late: the batch that a step lands is learned two steps later.
  for landed, learned in zip(rows, rows[2:], strict=False):
    more = learned['training/batch_tokens'] - landed['response_length/sum']
    assert (more > 0) == (landed['replay/rows'] > 0) and more >= 0
  assert rows[0]['replay/rows'] == 0 and max(row['replay/rows'] for row in rows) == 4 * 4
  assert max(row['replay/groups'] for row in rows) > 4
  assert {row['perf/rollouts'] for row in rows} == {4 * 4}


def test_more_steps_continue_a_finished_run(uninterrupted, tmp_path):
  config = tiny_job.config_file(tmp_path)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=6'))
  out = tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  assert 'resuming at step 6' in out
  assert tiny_job.rows(tmp_path / 'run') == tiny_job.rows(uninterrupted[0])


def test_steps_that_are_graded_go_on_where_a_finished_run_is_continued(lags, tmp_path):
  config = tiny_job.config_file(tmp_path, **LAGS)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=5'))
  assert len(tiny_job.rows(tmp_path / 'run')) == 5
  assert 'resuming at step 5' in tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  assert tiny_job.rows(tmp_path / 'run') == tiny_job.rows(lags)


def test_votes_and_replays_go_on_where_a_finished_run_is_continued(tmp_path):
  """Few prompts, so that most are met again: what is kept of them is part of the checkpoint."""
  config = tiny_job.config_file(tmp_path, **AGAIN)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'whole'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=2'))
  out = tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  assert 'resuming at step 2' in out
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'run') == rows
  again = [r['replay/rows'] for r in rows]
  assert again[0] == 0 and max(again[2:]) > 0
  for before, after in zip(rows, rows[1:], strict=False):
    more = after['training/batch_tokens'] - before['response_length/sum']
    assert (more > 0) == (before['replay/rows'] > 0) and more >= 0
  # Replays are off-policy; without a mark they would be seen here.
  assert max(r['training/rollout_probs_diff_max'] for r in rows) <= 1e-4
  assert max(r['critic/vote_share'] for r in rows) <= 1 and 'critic/vote_accuracy' in rows[0]
  assert 'grade/truncated' in rows[0]


def test_hidden_states_of_prompts_go_on_where_a_run_is_continued(tmp_path):
  """With a lag the pending step carries states that no curriculum has read; the words of answers go on, too."""
  config = tiny_job.config_file(tmp_path, **HIDDEN)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'whole'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=3'))
  assert 'resuming at step 3' in tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'run') == rows
  assert rows[-1]['curriculum/encoded'] == 1 and rows[-1]['curriculum/head_unexplained'] != 1
  assert rows[2]['curriculum/with_odds'] == rows[-1]['curriculum/with_odds'] == 1


def test_waiting_groups_and_their_top_ups_go_on_where_a_run_is_continued(tmp_path):
  """What is learned is what was kept: nothing in calls without a full batch, whole prompts in the others."""
  config = tiny_job.config_file(tmp_path, **WAITING)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'whole'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=4'))
  assert 'resuming at step 4' in tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'run') == rows
  assert max(r['collect/lacking'] for r in rows) > 0
  learned = [r['training/batch_tokens'] for r in rows]
  # The update of a call is on what the call before it handed over.
  idle = [
    before['collect/short'] == 0 and not now for before, now in zip(rows, learned[1:], strict=False)
  ]
  assert 0 < sum(idle) < len(idle)


def test_hints_go_on_where_a_run_is_continued_and_replies_are_judged_with_them(tmp_path):
  config = tiny_job.config_file(tmp_path, **HINTED)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'whole'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=5'))
  assert 'resuming at step 5' in tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'run') == rows
  assert rows[0]['hint/groups'] == 0 and max(r['hint/groups'] for r in rows) > 0
  with open(tmp_path / 'whole/rollouts/step_000007.jsonl') as file:
    said = [json.loads(line) for line in file]
  # Judged and written with what they were given: right ones are the whole answer.
  assert all(row['output'].startswith(row['gts']) for row in said if row['score'])


def continued(tmp_path, **changes):
  """The rows of metrics of a run that was stopped after three steps and went on; they are those of a whole one."""
  config = tiny_job.config_file(tmp_path, **changes)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'whole'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=3'))
  assert 'resuming at step 3' in tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'run') == rows
  return rows


@pytest.mark.parametrize(
  'changes, witness',
  [(INJECTED, 'replay/rows'), (CORRECTED, 'hint/corrected')],
  ids=['injected', 'corrected'],
)
def test_cached_and_corrected_completions_go_on_where_a_run_is_continued(
  tmp_path, changes, witness
):
  assert max(row[witness] for row in continued(tmp_path, **changes)[3:]) > 0


@pytest.mark.parametrize('mode', ['fused', 'lag'])
def test_hints_that_the_policy_writes_go_on_where_a_run_is_continued(mode, tmp_path):
  """Some wait for their groups then, and in fused mode a group waits for a slot."""
  rows = continued(tmp_path, **WRITTEN, mode=mode)
  assert rows[2]['hint/waiting'] == (mode == 'fused')
  for name in ('groups', 'mixed', 'learned'):
    assert max(row[f'hint/{name}'] for row in rows[3:]) > 0


def test_eight_devices_give_the_metrics_of_one(uninterrupted, tmp_path):
  mesh = dict(data=2, fsdp=2, tensor=2)
  config = tiny_job.config_file(tmp_path, mesh=mesh)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', devices=8))
  for one, eight in zip(
    tiny_job.rows(uninterrupted[0]), tiny_job.rows(tmp_path / 'run'), strict=True
  ):
    assert one.keys() == eight.keys()
    for name in one:
      np.testing.assert_allclose(eight[name], one[name], atol=1e-4, rtol=1e-3, err_msg=name)


def test_a_broken_newest_checkpoint_is_skipped_for_the_one_before(uninterrupted, tmp_path):
  config, run = tiny_job.config_file(tmp_path), tmp_path / 'run'
  tiny_job.finish(tiny_job.start(config, run, '--config.steps=6'))
  (run / 'checkpoints/step_000006/host.npz').write_bytes(b'PK')
  out = tiny_job.finish(tiny_job.start(config, run))
  assert 'resuming at step 4' in out and 'step_000006 is broken' in out
  assert tiny_job.rows(run) == tiny_job.rows(uninterrupted[0])


def told(capsys, *argv: str) -> str:
  """The one sentence of a refused command."""
  assert main.main(list(argv)) == 2
  text = capsys.readouterr().err.strip()
  assert text.startswith('error: ') and '\n' not in text and 'Traceback' not in text
  return text


@pytest.mark.parametrize(
  'changes, text',
  [
    (dict(rolouts=8), 'config.rolouts is unknown; did you mean rollouts'),
    (dict(rollouts='8'), "config.rollouts='8' must be of type int"),
    (dict(data=dict(source='csv')), "config.data.source='csv' is unknown; choose one of"),
    (dict(data=dict(source='gym', tasks=[dict(name='chain_sums')])), 'chain_sum'),
    (dict(data=dict(source='jsonl', path='nowhere.jsonl')), 'nowhere.jsonl'),
    (dict(rewards=dict(fn='guess')), "config.rewards.fn='guess'"),
    (dict(curriculum=dict(utility=dict(fn='mixed'))), 'mixed_group'),
    (dict(model='smollm9'), "config.model='smollm9'"),
    (dict(prompts=6, mesh=dict(fsdp=4)), 'is not a multiple of data × fsdp'),
    (dict(mesh=dict(data=3, fsdp=3)), 'does not fit'),
    (dict(temperature=0.0), 'config.temperature=0.0'),
    (dict(learner=dict(microbatch_tokens=3)), 'config.learner.microbatch_tokens=3 is less than'),
    (dict(prompts=100), 'config.prompts=100 is more than the'),
    (dict(prompt_tokens=60), 'are 66 together, and config.scratch.max_tokens=64'),
  ],
)
def test_bad_configs_are_one_sentence_before_anything_is_compiled(changes, text, tmp_path, capsys):
  config = tiny_job.config_file(tmp_path, **changes)
  assert text in told(capsys, f'--config={config}', f'--workdir={tmp_path}/run')


def test_bad_overrides_files_and_folders(tmp_path, capsys):
  config, run = tiny_job.config_file(tmp_path), f'--workdir={tmp_path}/run'
  argv = [f'--config={config}', run]
  assert 'did you mean --config.optimizer.learning_rate' in told(
    capsys, *argv, '--config.optimizer.learning_rte=1'
  )
  assert 'did you mean --config.temperature' in told(capsys, *argv, '--config.temprature=1')
  assert 'must be of type int' in told(capsys, *argv, '--config.steps=many')
  assert 'has no value' in told(capsys, *argv, '--config.steps')
  assert 'does not exist' in told(capsys, '--config=nowhere.py', run)
  empty, answerless = tmp_path / 'empty.jsonl', tmp_path / 'answerless.jsonl'
  empty.write_text('')
  answerless.write_text('{"question": "a", "answer": "b"}\n{"question": "c"}\n')
  for path, text in ((empty, 'empty'), (answerless, '2')):
    changes = dict(data=dict(source='jsonl', path=str(path), chat=False))
    config = tiny_job.config_file(tmp_path, **changes)
    message = told(capsys, f'--config={config}', run)
    assert str(path) in message and text in message


def test_a_workdir_that_cannot_be_used_or_is_of_another_config(uninterrupted, tmp_path, capsys):
  config = tiny_job.config_file(tmp_path)
  (tmp_path / 'file').write_text('')
  assert 'cannot be used' in told(capsys, f'--config={config}', f'--workdir={tmp_path}/file/run')
  message = told(
    capsys, f'--config={config}', f'--workdir={uninterrupted[0]}', '--config.temperature=0.5'
  )
  assert 'temperature: 1.0 -> 0.5' in message and 'another --workdir' in message


def test_a_run_without_its_checkpoints_or_config_is_not_begun_again_over_it(
  uninterrupted, tmp_path, capsys
):
  config, run = f'--config={uninterrupted[0].parent}/config.py', tmp_path / 'run'
  flags = (
    config,
    f'--workdir={run}',
    '--config.monitoring.trackers=("tensorboard",)',
    '--config.monitoring.profile.steps=4:6',
  )
  shutil.copytree(uninterrupted[0], run)
  before = (run / 'metrics.jsonl').read_bytes()
  (run / 'config.json').unlink()
  assert 'seed: 0 -> 1' in told(capsys, *flags, '--config.seed=1')
  shutil.rmtree(run / 'checkpoints')
  assert 'had one of step 10, and' in told(capsys, *flags)
  assert (run / 'metrics.jsonl').read_bytes() == before and not (run / 'config.json').exists()


def test_help_and_unknown_modes_answer_without_jax():
  code = 'import sys; from jaxrl_llm import main; main.main(["--help"])'
  out = subprocess.run(
    [sys.executable, '-X', 'importtime', '-c', code], capture_output=True, text=True
  )
  assert '--workdir' in out.stdout and ' jax\n' not in out.stderr


def test_generate_prints_the_answers_of_the_newest_checkpoint(uninterrupted, tmp_path):
  """The digits task is easy: the trained model copies, and prompts come from a file and the command line."""
  (tmp_path / 'prompts.txt').write_text('copy:7=\n\ncopy:12=\n')
  run = uninterrupted[0]
  config = str(run.parent / 'config.py')
  out = tiny_job.finish(
    tiny_job.start(
      config, run, '--mode=generate', '--prompt=copy:3=', f'--prompts={tmp_path}/prompts.txt',
      '--config.evaluation.sampling.temperature=0.0', '--samples=2',
    )
  )  # fmt: skip
  lines = [line for line in out.splitlines() if line]
  first = lines.index('> copy:3=')
  assert lines[first + 1 : first + 3] == ['3', '3']
  assert lines[first + 3 :: 3] == ['> copy:7=', '> copy:12=']


@pytest.mark.parametrize(
  'flags, told',
  [
    ([], 'has 0 prompts and --samples=1; give at least one of each'),
    (['--prompt=a', '--samples=0'], 'has 1 prompts and --samples=0'),
    (['--prompts=nowhere.txt'], '--prompts=nowhere.txt cannot be read'),
  ],
)
def test_generate_without_prompts_is_told(flags, told, tmp_path, capsys):
  assert main.main([f'--workdir={tmp_path}', '--mode=generate', *flags]) == 2
  assert told in capsys.readouterr().err


@pytest.mark.parametrize('mode', ['export', 'generate'])
def test_a_folder_in_which_nothing_was_trained_is_refused_without_base(mode, tmp_path, capsys):
  """A mistyped --workdir must not give the base model as if it had been trained."""
  config = tiny_job.config_file(tmp_path, sft=None)
  run, to = str(tmp_path / 'runn'), str(tmp_path / 'out')
  flags = [f'--config={config}', f'--workdir={run}', f'--mode={mode}']
  flags += [f'--to={to}'] if mode == 'export' else ['--prompt=copy:3=']
  assert main.main(flags) == 2
  error = capsys.readouterr().err
  assert f'--workdir={run} has no checkpoint' in error and '--base' in error
  assert not os.path.exists(run) and not os.path.exists(to)
  assert main.main([*flags, '--base']) == 0
  assert 'after' not in capsys.readouterr().out
