"""launch/: what the scripts would do, what they do with stand-ins for gcloud, srun and python; valid files."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
import quick
import tiny_job

from jaxrl_llm.commands import flags as command_flags
from jaxrl_llm.distributed import preemption, watchdog

LAUNCH = pathlib.Path(__file__).parents[1] / 'launch'
SCRIPTS = sorted(path.name for path in LAUNCH.glob('*.sh'))
CONFIG = ['--config=configs/dapo.py', '--config.data.template=a b "c"']


def needed(name: str):
  """A package of the extra `dev`: where all was installed, its tests may not be skipped."""
  if os.environ.get('JAXRL_LLM_REQUIRE_PARITY') == '1':
    return importlib.import_module(name)
  return pytest.importorskip(name)


def bash(*command: str, cwd=LAUNCH.parent, path='', **environ: str) -> subprocess.CompletedProcess:
  kept = {k: v for k, v in os.environ.items() if not k.startswith(('SLURM', 'SBATCH'))}
  kept['PATH'] = f'{path}:{kept["PATH"]}' if path else kept['PATH']
  return subprocess.run(
    ['bash', *command], cwd=cwd, env=kept | environ, capture_output=True, text=True, timeout=60
  )


def launch(script: str, *arguments: str, **more) -> list[list[str]]:
  """The commands that it prints, each as words."""
  done = bash(str(LAUNCH / script), *arguments, **more)
  assert done.returncode == 0, done.stderr
  read_back = 'while read -r line; do eval "set -- $line"; printf "%s\\0" "$@"; printf "\\n"; done'
  words = subprocess.run(
    ['bash', '-c', read_back], input=done.stdout, capture_output=True, text=True, check=True
  )
  return [line.split('\0') for line in words.stdout.removesuffix('\0\n').split('\0\n')]


def stand_in(folder: pathlib.Path, name: str, body: str) -> None:
  """A program of that name that notes its arguments in the file `calls` and then does `body`."""
  note = f'printf "%s\\0" {name} "$@" >>"{folder}/calls"; printf "\\n" >>"{folder}/calls"'
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f'#!/usr/bin/env bash\n{note}\n{body}\n')
  path.chmod(0o755)


def calls(folder: pathlib.Path) -> list[list[str]]:
  told = (folder / 'calls').read_text()
  return [line.rstrip('\0').split('\0') for line in told.split('\0\n') if line]


def trained(words: list[str]) -> tuple:
  """What the command line makes of the words after `jaxrl_llm.main`; unknown flags raise SystemExit."""
  return command_flags.parse(words[words.index('jaxrl_llm.main') + 1 :])


@pytest.mark.parametrize('script', SCRIPTS)
def test_scripts_are_strict_and_clean(script):
  text = (LAUNCH / script).read_text()
  assert text.startswith('#!/usr/bin/env bash\n') and '\nset -euo pipefail\n' in text
  assert os.access(LAUNCH / script, os.X_OK)
  checker = shutil.which(
    'shellcheck', path=f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}'
  )
  if checker is None:
    needed('shellcheck')
  done = subprocess.run([checker, str(LAUNCH / script)], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('script', SCRIPTS)
def test_help_is_the_comment_at_the_top(script):
  told = bash(str(LAUNCH / script), '--help')
  assert told.returncode == 0 and f'launch/{script} [--dry-run]' in told.stdout
  assert '#' not in told.stdout and 'set -e' not in told.stdout


@pytest.mark.parametrize('script, arguments', [('tpu_vm.sh', []), ('gke.sh', ['walk'])])
def test_a_wrong_verb_is_bad_input(script, arguments):
  told = bash(str(LAUNCH / script), *arguments)
  assert told.returncode == 2 and 'run|' in told.stderr


@pytest.mark.parametrize(
  'script, environ, name',
  [('tpu_vm.sh', {}, 'BUCKET'), ('gke.sh', dict(BUCKET='b'), 'IMAGE')],
)
def test_what_must_be_set_is_named(script, environ, name):
  told = bash(str(LAUNCH / script), 'run', **(dict(BUCKET='', IMAGE='') | environ))
  assert told.returncode == 2 and f'{name} is not set' in told.stderr


@pytest.mark.parametrize(
  'script, words',
  [
    ('tpu_vm.sh', ['delete']),
    ('gke.sh', ['delete']),
    ('gke.sh', ['run', *CONFIG]),
    ('slurm.sh', CONFIG),
  ],
)
def test_a_dry_run_may_be_asked_for_last(script, words, tmp_path):
  for program in ('gcloud', 'kubectl', 'sbatch'):
    stand_in(tmp_path, program, '')
  settings = dict(BUCKET='b', IMAGE='i', path=str(tmp_path))
  first, last = (
    bash(str(LAUNCH / script), *arguments, **settings)
    for arguments in (['--dry-run', *words], [*words, '--dry-run'])
  )
  assert first.returncode == last.returncode == 0
  assert first.stdout == last.stdout != '' and not (tmp_path / 'calls').exists()


# TPU VMs.


def test_without_gcloud_nothing_is_tried(tmp_path):
  (tmp_path / 'bash').symlink_to(shutil.which('bash'))
  told = bash(str(LAUNCH / 'tpu_vm.sh'), 'delete', PATH=str(tmp_path))
  assert told.returncode == 2 and told.stderr.startswith('tpu_vm.sh: gcloud is not installed; ')


def test_the_reason_of_an_unknown_state_is_printed(tmp_path):
  (tmp_path / 'states').write_text('ACTIVE\nACTIVE\n')
  fails_once = '[ -e failed ] || { touch failed; echo no active account >&2; exit 1; }'
  stand_in(tmp_path, 'gcloud', fails_once + GCLOUD)
  stand_in(tmp_path, 'git', '')
  settings = dict(BUCKET='b', POLL_S='0', ENDED='0', TMPDIR=str(tmp_path))
  told = bash(str(LAUNCH / 'tpu_vm.sh'), 'resume', cwd=tmp_path, path=str(tmp_path), **settings)
  assert told.returncode == 0 and 'no active account' in told.stderr


def test_tpu_vm_says_what_it_would_do():
  environ = dict(BUCKET='b', NAME='n', ZONE='z', PROJECT='p', POLL_S='0')
  request, _archive, copy, *_ = launch('tpu_vm.sh', '--dry-run', 'create', **environ)
  where = ['--zone=z', '--project=p']
  wanted = ['--accelerator-type=v5litepod-16', '--runtime-version=v2-alpha-tpuv5-lite', '--spot']
  resources = ['gcloud', 'compute', 'tpus', 'queued-resources']
  assert request == [*resources, 'create', 'n', '--node-id=n', *where, *wanted]
  assert copy[:4] == ['gcloud', 'compute', 'tpus', 'tpu-vm'] and copy[-1] == '--worker=all'
  request, *_ = launch('tpu_vm.sh', '--dry-run', 'create', SPOT='0', **environ)
  assert '--spot' not in request
  deleted = launch('tpu_vm.sh', '--dry-run', 'delete', **environ)
  assert deleted == [[*resources, 'delete', 'n', *where, '--force', '--quiet']]


def host_command(*flags: str) -> str:
  told = launch('tpu_vm.sh', '--dry-run', 'run', *flags, BUCKET='b', NAME='n', RESTARTS='2')
  assert '--worker=all' in told[0]
  return told[0][-1].removeprefix('--command=')


def ends_with(folder: pathlib.Path, name: str, statuses: str) -> None:
  """A stand-in that ends with these statuses, one after the other."""
  queue = folder / 'statuses'
  folder.mkdir(parents=True, exist_ok=True)
  queue.write_text('\n'.join(statuses.split()) + '\n')
  stand_in(folder, name, f'status=$(head -n 1 "{queue}"); sed -i 1d "{queue}"; exit "$status"')


# Of what started, what ended it, and how often it is started, with RESTARTS=2: after a death, of another process (76)
# or of this one by a signal, but no more often than that, and not after bad input, a bug, or who wants an end.
assert (preemption.EXIT_PREEMPTED, watchdog.EXIT_PEER_LOST) == (75, 76)
DEATHS = [
  ('76 0', 0, 2),
  ('137 134 0', 0, 3),
  ('76 76 76 0', 76, 3),
  ('76 2', 2, 2),
  ('1', 1, 1),
  ('143', 143, 1),
  ('130', 130, 1),
]


@pytest.mark.parametrize(
  'statuses, ended, starts', [('75 75 75 75 0', 0, 5), ('75 2 0', 2, 2), *DEATHS]
)
def test_a_tpu_host_starts_again_after_a_stop_and_after_deaths(tmp_path, statuses, ended, starts):
  ends_with(tmp_path / 'jaxrl_llm', '.venv/bin/python', statuses)
  done = bash('-c', host_command(*CONFIG) + '\nwait', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'status').read_text() == f'{ended}\n', (tmp_path / 'train.log').read_text()
  made = calls(tmp_path / 'jaxrl_llm')
  assert len(made) == starts
  arguments, overrides = trained(made[-1])
  assert arguments.config == 'configs/dapo.py' and overrides == CONFIG[1:]
  assert arguments.workdir == '../bucket/runs/n'


GCLOUD = """
case "$*" in
  *' list '*) head -n 1 states; sed -i 1d states ;;
  *'cat status'*) echo "$ENDED" ;;
esac
"""


@pytest.mark.parametrize(
  'states, ended, did',
  [
    # There, and ends well; there, and told to stop for good: nothing is made.
    (['ACTIVE', 'ACTIVE'], '0', []),
    (['ACTIVE', 'ACTIVE'], '2', []),
    # Never asked for.
    (['', '', 'WAITING_FOR_RESOURCES', 'ACTIVE', 'ACTIVE'], '0', ['create']),
    # Preempted before this command.
    (['SUSPENDED', 'SUSPENDED', 'ACTIVE', 'ACTIVE'], '0', ['delete', 'create']),
    # Preempted while it is watched.
    (['ACTIVE', 'SUSPENDING', 'SUSPENDING', 'SUSPENDED', 'ACTIVE', 'ACTIVE'], '0', ['delete', 'create']),
  ],
)  # fmt: skip
def test_resume_brings_the_slice_back(tmp_path, states, ended, did):
  (tmp_path / 'states').write_text('\n'.join(states) + '\n')
  stand_in(tmp_path, 'gcloud', GCLOUD)
  stand_in(tmp_path, 'git', '')
  told = bash(
    str(LAUNCH / 'tpu_vm.sh'), 'resume', *CONFIG,
    cwd=tmp_path, path=str(tmp_path), BUCKET='b', POLL_S='0', ENDED=ended,
  )  # fmt: skip
  assert told.returncode == int(ended), told.stderr
  made = [call for call in calls(tmp_path) if call[0] == 'gcloud']
  assert [call[4] for call in made if call[4] in ('create', 'delete')] == did
  started = ['nohup flock' in call[-1] for call in made if call[4] == 'ssh']
  assert sum(started) == 1 + ('SUSPENDING' in states)
  # A slice that is there gets new code, too.
  installed = [call for call in made if call[4] == 'scp']
  assert len(installed) == did.count('create') + (states[0] == 'ACTIVE')


def install_script(commit_of: pathlib.Path, **environ: str) -> tuple[str, str]:
  """What `sync` runs on a host, and what it prints to stderr."""
  done = bash(
    str(LAUNCH / 'tpu_vm.sh'), '--dry-run', 'sync', path=str(commit_of), BUCKET='b', **environ
  )
  assert done.returncode == 0, done.stderr
  words = subprocess.run(
    ['bash', '-c', 'eval "set -- $(tail -n 1)"; printf "%s" "${!#}"'],
    input=done.stdout, capture_output=True, text=True, check=True,
  )  # fmt: skip
  return words.stdout.removeprefix('--command='), done.stderr


def host(folder: pathlib.Path) -> pathlib.Path:
  """A host with an archive of the project, and stand-ins for the programs that installation calls."""
  bin = folder / 'bin'
  for name in ('gcsfuse', 'mountpoint', 'uv', 'curl'):
    stand_in(bin, name, '')
  (folder / 'source').mkdir()
  (folder / 'source' / 'new.py').write_text('1')
  subprocess.run(
    ['tar', '-czf', folder / 'jaxrl_llm.tar.gz', '-C', folder / 'source', 'new.py'], check=True
  )
  return bin


def git_stand_in(folder: pathlib.Path, commit: str, changed: str = '') -> pathlib.Path:
  stand_in(
    folder, 'git', f'case "$*" in *rev-parse*) echo {commit} ;; *status*) echo "{changed}" ;; esac'
  )
  return folder


def test_a_host_installs_each_commit_once_with_a_python_of_its_own(tmp_path):
  bin, home = host(tmp_path / 'home'), tmp_path / 'home'
  (home / 'jaxrl_llm' / '.venv').mkdir(parents=True)
  (home / 'jaxrl_llm' / 'old.py').write_text('0')
  script, warned = install_script(git_stand_in(tmp_path / 'one', 'c1'), EXTRAS='tpu,math')
  assert warned == ''
  for _ in range(2):
    done = bash('-c', script, cwd=home, path=str(bin), HOME=str(home))
    assert done.returncode == 0, done.stderr
  made = [call[1:] for call in calls(bin) if call[0] == 'uv']
  assert made == [
    ['venv', '--quiet', '--allow-existing', '--python', '3.12', '.venv'],
    ['pip', 'install', '--quiet', '--python', '.venv/bin/python', '-e', '.[tpu,math]'],
  ]
  assert sorted(x.name for x in (home / 'jaxrl_llm').iterdir()) == ['.venv', 'new.py']
  script, warned = install_script(git_stand_in(tmp_path / 'two', 'c2', ' M a.py'))
  assert 'changes that are not committed are not installed; c2 is' in warned
  assert bash('-c', script, cwd=home, path=str(bin), HOME=str(home)).returncode == 0
  assert len([call for call in calls(bin) if call[0] == 'uv']) == 4


def test_a_host_keeps_its_code_while_it_trains(tmp_path):
  bin, home = host(tmp_path / 'home'), tmp_path / 'home'
  script, _ = install_script(git_stand_in(tmp_path / 'one', 'c1'))
  training = f'exec 8>lock; flock 8; bash -c {shlex.quote(script)} 8>&-'
  done = bash('-c', training, cwd=home, path=str(bin), HOME=str(home))
  assert done.returncode == 0 and 'training runs here' in done.stderr
  assert not (home / 'jaxrl_llm').exists()


def test_stop_ends_training_for_good(tmp_path):
  """A run that has saved its state ends with 75, which starts it again, unless it was stopped."""
  stopping = launch('tpu_vm.sh', '--dry-run', 'stop', NAME='n')[0][-1].removeprefix('--command=')
  mark, kill = stopping.split('; ', 1)
  assert mark == 'touch stopped' and kill.startswith('pkill -TERM -f')
  stand_in(tmp_path / 'jaxrl_llm', '.venv/bin/python', f'(cd ../ && {mark}); exit 75')
  done = bash('-c', host_command(*CONFIG) + '\nwait', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'status').read_text() == '143\n'
  assert len(calls(tmp_path / 'jaxrl_llm')) == 1


# Slurm.


def test_slurm_says_what_it_would_do():
  submitted, *settings, step = launch('slurm.sh', '--dry-run', *CONFIG)
  assert submitted == ['sbatch', str(LAUNCH / 'slurm.sh'), *CONFIG]
  assert {'--requeue', '--signal=TERM@180', '--ntasks-per-node=1'} <= {s[0] for s in settings}
  assert step[0] == 'srun' and trained(step)[1] == CONFIG[1:]


@pytest.mark.parametrize(
  'statuses, ended, starts', [('0', 0, 1), ('2', 2, 1), ('75', 75, 1), ('76 75', 75, 2), *DEATHS]
)
def test_slurm_starts_again_after_deaths_and_requeues_what_was_told_to_stop(
  tmp_path, statuses, ended, starts
):
  ends_with(tmp_path, 'srun', statuses)
  stand_in(tmp_path, 'scontrol', '')
  told = bash(
    str(LAUNCH / 'slurm.sh'), *CONFIG,
    path=str(tmp_path), SLURM_JOB_ID='7', SLURM_SUBMIT_DIR=str(tmp_path), RESTARTS='2',
  )  # fmt: skip
  assert told.returncode == ended, told.stderr
  made = calls(tmp_path)
  assert [call[0] for call in made].count('srun') == starts
  assert (['scontrol', 'requeue', '7'] in made) == (ended == preemption.EXIT_PREEMPTED)


def test_slurm_waits_for_a_step_that_saves(tmp_path):
  """The batch shell gets the signal of a preemption too, and must not end before the step has."""
  stand_in(tmp_path, 'srun', 'kill -TERM $PPID; sleep 0.3; exit 75')
  stand_in(tmp_path, 'scontrol', '')
  told = bash(
    str(LAUNCH / 'slurm.sh'), path=str(tmp_path), SLURM_JOB_ID='7', SLURM_SUBMIT_DIR=str(tmp_path)
  )
  assert told.returncode == 75
  assert calls(tmp_path)[-1] == ['scontrol', 'requeue', '7']


def test_slurm_submits_itself(tmp_path):
  stand_in(tmp_path, 'sbatch', '')
  assert bash(str(LAUNCH / 'slurm.sh'), *CONFIG, path=str(tmp_path)).returncode == 0
  assert calls(tmp_path) == [['sbatch', str(LAUNCH / 'slurm.sh'), *CONFIG]]


# Kubernetes.

POD = {
  'restartPolicy', 'terminationGracePeriodSeconds', 'serviceAccountName', 'nodeSelector',
  'tolerations', 'containers', 'volumes',
}  # fmt: skip
JOB = {
  'completionMode', 'parallelism', 'completions', 'backoffLimit', 'podFailurePolicy', 'template',
}  # fmt: skip


def jobset(*flags: str, **environ: str) -> dict:
  yaml = needed('yaml')
  environ = dict(BUCKET='b', IMAGE='here/it:1') | environ
  told = bash(str(LAUNCH / 'gke.sh'), '--dry-run', 'run', *flags, **environ)
  assert told.returncode == 0, told.stderr
  assert told.stdout.startswith('# kubectl apply -f -\n') and '${' not in told.stdout
  return yaml.safe_load(told.stdout)


def test_the_jobset_is_one_slice():
  made = jobset(*CONFIG, HOSTS='8', TOPOLOGY='4x8', NAME='n')
  assert (made['apiVersion'], made['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
  assert made.keys() == {'apiVersion', 'kind', 'metadata', 'spec'}
  assert made['spec'].keys() == {'failurePolicy', 'replicatedJobs'}
  (replicated,) = made['spec']['replicatedJobs']
  assert replicated.keys() == {'name', 'replicas', 'template'}
  job = replicated['template']['spec']
  assert job.keys() <= JOB
  assert (job['parallelism'], job['completions'], job['completionMode']) == (8, 8, 'Indexed')
  pod = job['template']['spec']
  assert pod.keys() <= POD
  assert pod['nodeSelector']['cloud.google.com/gke-tpu-topology'] == '4x8'
  (container,) = pod['containers']
  assert {m['name'] for m in container['volumeMounts']} == {v['name'] for v in pod['volumes']}
  arguments, overrides = trained([*container['command'], *container['args']])
  assert arguments.workdir == '/bucket/runs/n' and overrides == CONFIG[1:]
  assert container['resources']['limits'] == container['resources']['requests']


def test_the_jobset_starts_again_except_for_bad_input():
  made = jobset()
  job = made['spec']['replicatedJobs'][0]['template']['spec']
  # Only bad input is no reason to start again; 75 and 76, of a pod that lost another, are.
  # A pod that ends with 2 fails its job for the reason PodFailurePolicy, and by that the set; any other end
  # fails the job for want of retries, and the set's default is to start again.
  (rule,) = job['podFailurePolicy']['rules']
  (container,) = job['template']['spec']['containers']
  wanted = dict(containerName=container['name'], operator='In', values=[2])
  assert rule == dict(action='FailJob', onExitCodes=wanted)
  assert job['backoffLimit'] == 0 and job['template']['spec']['restartPolicy'] == 'Never'
  policy = made['spec']['failurePolicy']
  (rule,) = policy['rules']
  assert (rule['action'], rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
  assert policy['maxRestarts'] == 100


# SkyPilot.


def test_skypilot_has_known_keys_and_recovers_what_was_told_to_stop():
  task = needed('yaml').safe_load((LAUNCH / 'skypilot.yaml').read_text())
  known = {'name', 'workdir', 'num_nodes', 'resources', 'file_mounts', 'setup', 'run', 'envs'}
  assert task.keys() <= known
  assert task['resources'].keys() <= {'accelerators', 'use_spot', 'job_recovery'}
  recovery = task['resources']['job_recovery']
  assert recovery == dict(
    max_restarts_on_errors=0, recover_on_exit_codes=[preemption.EXIT_PREEMPTED]
  )
  for name in ('setup', 'run'):
    assert bash('-n', '-c', task[name]).returncode == 0


@pytest.mark.parametrize('statuses, ended, starts', [('75', 75, 1), ('2', 2, 1), *DEATHS])
def test_skypilot_starts_again_after_deaths(tmp_path, statuses, ended, starts):
  task = needed('yaml').safe_load((LAUNCH / 'skypilot.yaml').read_text())
  assert task['envs'].pop('RESTARTS') == '5'
  ends_with(tmp_path, '.venv/bin/python', statuses)
  one = dict(SKYPILOT_NUM_NODES='1', SKYPILOT_NODE_RANK='0', SKYPILOT_NUM_GPUS_PER_NODE='8')
  done = bash('-c', task['run'], cwd=tmp_path, RESTARTS='2', **task['envs'], **one)
  assert done.returncode == ended, done.stderr
  assert len(calls(tmp_path)) == starts


def test_skypilot_hands_on_the_wish_to_stop(tmp_path):
  task = needed('yaml').safe_load((LAUNCH / 'skypilot.yaml').read_text())
  body = 'trap "exit 75" TERM; kill -TERM $PPID; for _ in $(seq 100); do sleep 0.1; done; exit 1'
  stand_in(tmp_path, '.venv/bin/python', body)
  one = dict(SKYPILOT_NUM_NODES='1', SKYPILOT_NODE_RANK='0', SKYPILOT_NUM_GPUS_PER_NODE='8')
  done = bash('-c', task['run'], cwd=tmp_path, **task['envs'], **one)
  assert done.returncode == preemption.EXIT_PREEMPTED, done.stderr
  assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize('nodes, gpus, flags', [(2, 8, 3), (1, 8, 0), (1, 0, 0)])
def test_skypilot_runs_one_process_a_node(tmp_path, nodes, gpus, flags):
  task = needed('yaml').safe_load((LAUNCH / 'skypilot.yaml').read_text())
  stand_in(tmp_path, '.venv/bin/python', '')
  told = dict(
    SKYPILOT_NUM_NODES=nodes, SKYPILOT_NODE_RANK=nodes - 1, SKYPILOT_NUM_GPUS_PER_NODE=gpus
  )
  done = bash(
    '-c', task['run'], cwd=tmp_path, SKYPILOT_NODE_IPS='10.0.0.1\n10.0.0.2',
    **task['envs'], **{name: str(value) for name, value in told.items()},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  (made,) = calls(tmp_path)
  arguments, _ = trained(made)
  assert (arguments.workdir, arguments.config) == ('/bucket/dapo', 'configs/dapo.py')
  peers = (arguments.coordinator, arguments.processes, arguments.process)
  assert peers == (('10.0.0.1:8476', 2, 1) if flags else ('', None, None))


# The notebook.


def test_the_notebook_is_valid_and_has_no_outputs():
  nbformat = needed('nbformat')
  notebook = nbformat.read(LAUNCH / 'colab.ipynb', as_version=4)
  nbformat.validate(notebook)
  assert all(not cell.get('outputs') for cell in notebook.cells)


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
  """On CPU, with a small model for few steps; JAXRL_LLM_NOTEBOOK_FLAGS= runs all of it, in minutes."""
  small = dict(width=32, layers=2, heads=2, kv_heads=1, mlp=64, max_tokens=64)
  few = dict(steps=2, prompts=4, rollouts=2)
  few |= {'sft.steps': 2, 'sft.prompts': 4}
  few |= {'evaluation.prompts': 4, 'evaluation.samples': 1, 'data.size': 200}
  few |= {f'scratch.{name}': value for name, value in small.items()}
  flags = ' '.join(f'--config.{name}={value}' for name, value in few.items())
  cells = json.loads((LAUNCH / 'colab.ipynb').read_text())['cells']
  code = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
  (tmp_path / 'cells.py').write_text(code + "\nprint('the last cell ran')\n")
  environ = dict(JAXRL_LLM_NOTEBOOK_FLAGS=flags, JAXRL_LLM_NOTEBOOK_WORKDIR=str(tmp_path / 'run'))
  environ = (
    os.environ | environ | dict(MPLBACKEND='agg', JAX_PLATFORMS='cpu', XLA_FLAGS=quick.flags(1))
  )
  out = tiny_job.finish(
    subprocess.Popen(
      [sys.executable, tmp_path / 'cells.py'], cwd=LAUNCH, env=environ,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
  )  # fmt: skip
  assert 'the last cell ran' in out
  assert 'step_000000' in out and ' -> ' in out and 'score ' in out
