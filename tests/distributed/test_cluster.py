"""Detection of the processes of a run from the environment of each kind of launcher."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from jaxrl_llm import main
from jaxrl_llm.distributed import cluster
from jaxrl_llm.types import UserError

SLURM = dict(
  SLURM_JOB_ID='4711', SLURM_NTASKS='4', SLURM_STEP_NUM_TASKS='4', SLURM_STEP_NUM_NODES='4',
  SLURM_STEP_NODELIST='gpu[03-06]', SLURM_PROCID='2', SLURM_LOCALID='0', SLURM_GPUS_ON_NODE='8',
)  # fmt: skip
ALL_SEEN = dict(SLURM_GPUS_ON_NODE='2', CUDA_VISIBLE_DEVICES='0,1')
JOBSET = dict(
  KUBERNETES_SERVICE_HOST='10.0.0.1', JOB_COMPLETION_INDEX='1',
  JAX_COORDINATOR_ADDRESS='run-gpu-0-0.run:8476', JAX_NUM_PROCESSES='2',
)  # fmt: skip
MPI = dict(
  OMPI_COMM_WORLD_SIZE='8', OMPI_COMM_WORLD_RANK='5', OMPI_COMM_WORLD_LOCAL_SIZE='4',
  OMPI_COMM_WORLD_LOCAL_RANK='1',
)  # fmt: skip
ORTE = dict(OMPI_MCA_orte_hnp_uri='1531576320.0;tcp://10.96.0.1:34911')


def no_metadata(key: str) -> str:
  raise AssertionError(f'unexpected query of {key}')


def detect(environ, *flags, metadata=no_metadata):
  return cluster.detect(dict(TPU_SKIP_MDS_QUERY='1') | environ, *flags, metadata=metadata)


def arguments_of(coordinator: str, processes: int, process: int) -> dict:
  return dict(
    coordinator_address=coordinator,
    num_processes=processes,
    process_id=process,
    cluster_detection_method='deactivate',
  )


@pytest.mark.parametrize(
  'environ',
  [
    {},
    SLURM | dict(SLURM_NTASKS='1'),
    dict(SLURM_NTASKS='4'),
    dict(KUBERNETES_SERVICE_HOST='10.0.0.1', JOB_COMPLETION_INDEX='3'),
    JOBSET | dict(JAX_NUM_PROCESSES='1'),
    MPI | dict(OMPI_COMM_WORLD_SIZE='1'),
    dict(TPU_WORKER_HOSTNAMES='localhost', TPU_WORKER_ID='0'),
    dict(TPU_PROCESS_ADDRESSES='local'),
    dict(TPU_WORKER_HOSTNAMES='a,b', JAX_PLATFORMS='cpu'),
  ],
)
def test_one_process(environ):
  assert detect(environ) == cluster.SINGLE_PROCESS


@pytest.mark.parametrize(
  'environ, found_by, processes, arguments, all_devices',
  [
    (SLURM, 'Slurm', 4, dict(cluster_detection_method='slurm'), True),
    # Two tasks on a node that both see all devices: one each, as jax gives them.
    (
      SLURM | ALL_SEEN | dict(SLURM_STEP_NUM_NODES='2'),
      'Slurm', 4, dict(cluster_detection_method='slurm'), False,
    ),
    # Each task sees only its own device, so that index SLURM_LOCALID does not exist.
    (
      SLURM | ALL_SEEN | dict(SLURM_STEP_NUM_NODES='2', CUDA_VISIBLE_DEVICES='0'),
      'Slurm', 4, dict(cluster_detection_method='slurm'), True,
    ),
    (JOBSET, 'Kubernetes', 2, arguments_of('run-gpu-0-0.run:8476', 2, 1), True),
    (JOBSET | dict(JOB_COMPLETION_INDEX='0'), 'Kubernetes', 2, arguments_of('run-gpu-0-0.run:8476', 2, 0), True),
    (JOBSET | dict(JAX_PROCESS_ID='0'), 'JAX_NUM_PROCESSES', 2, arguments_of('run-gpu-0-0.run:8476', 2, 0), True),
    (MPI | ORTE, 'Open MPI', 8, dict(cluster_detection_method='ompi'), False),
    (
      MPI | ORTE | dict(OMPI_COMM_WORLD_LOCAL_SIZE='1'),
      'Open MPI', 8, dict(cluster_detection_method='ompi'), True,
    ),
    (
      MPI | dict(JAX_COORDINATOR_ADDRESS='n1:8476'),
      'Open MPI', 8, arguments_of('n1:8476', 8, 5) | dict(local_device_ids=[1]), False,
    ),
    (
      dict(TPU_WORKER_HOSTNAMES='a,b,c,d', TPU_WORKER_ID='3'),
      'the TPU pod', 4, dict(cluster_detection_method='gketpu'), True,
    ),
    (
      dict(TPU_WORKER_HOSTNAMES='a', MEGASCALE_NUM_SLICES='2', JAX_PLATFORMS='tpu,cpu'),
      'the TPU pod', 2, dict(cluster_detection_method='gketpu'), True,
    ),
    # mpirun in an allocation of Slurm: jax looks at Open MPI first, and so do we.
    (SLURM | MPI | ORTE, 'Open MPI', 8, dict(cluster_detection_method='ompi'), False),
  ],
)  # fmt: skip
def test_several_processes(environ, found_by, processes, arguments, all_devices):
  assert detect(environ) == (found_by, processes, arguments, all_devices)


@pytest.mark.parametrize(
  'attributes, processes',
  [
    ({}, 1),
    ({'worker-network-endpoints': 'a:0:10.0.0.1'}, 1),
    ({'worker-network-endpoints': 'a:0:10.0.0.1,b:1:10.0.0.2'}, 2),
    ({'worker-network-endpoints': 'a,b', 'tpu-env': "X: '9'\nMEGASCALE_NUM_SLICES: '2'\n"}, 4),
  ],
)
def test_a_tpu_vm_queries_the_metadata_server(attributes, processes):
  found = cluster.detect({}, metadata=lambda key: attributes.get(key, ''))
  assert found.processes == processes
  assert found.arguments == (dict(cluster_detection_method='gcetpu') if processes > 1 else {})


@pytest.mark.parametrize('environ', [{}, SLURM, JOBSET, MPI, dict(TPU_WORKER_HOSTNAMES='a,b')])
def test_flags_win(environ):
  assert detect(environ, 'h:1', 3, 2) == ('flags', 3, arguments_of('h:1', 3, 2), True)
  assert detect(environ, '[::1]:8476', 1, 0).arguments == arguments_of('[::1]:8476', 1, 0)
  assert detect(environ, '', 1) == detect(environ, '', 1, 0) == cluster.SINGLE_PROCESS


@pytest.mark.parametrize(
  'environ, flags, words',
  [
    ({}, ('h:1', 2, 2), '--process=2 with --processes=2: processes are numbered from 0 to 1'),
    ({}, ('h:1', 2, -1), '--process=-1'),
    ({}, ('h:1', 0, 0), '--processes=0'),
    ({}, ('host', 2, 0), '--coordinator=host is no host:port'),
    ({}, ('host:', 2, 0), 'no host:port'),
    ({}, (':8476', 2, 0), 'no host:port'),
    ({}, ('host:99999', 2, 0), 'no host:port'),
    ({}, ('h:1', None, None), '--processes and --process not given'),
    ({}, ('h:1', 2, None), '--process not given'),
    ({}, ('', 2, 1), '--coordinator not given'),
    ({}, ('', 1, 1), '--coordinator not given'),
    ({}, ('', None, 1), '--coordinator and --processes not given'),
    (SLURM | dict(SLURM_STEP_NUM_TASKS='1'), (), 'srun did not start this process'),
    (dict(SLURM_JOB_ID='1', SLURM_NTASKS='2', SLURM_PROCID='0'), (), 'srun did not start'),
    (SLURM | dict(SLURM_NTASKS='four'), (), 'SLURM_NTASKS=four is no whole number'),
    (
      JOBSET | dict(JOB_COMPLETION_INDEX='2'),
      (),
      'JOB_COMPLETION_INDEX=2 with JAX_NUM_PROCESSES=2',
    ),
    (
      JOBSET | dict(JAX_COORDINATOR_ADDRESS='run'),
      (),
      'JAX_COORDINATOR_ADDRESS=run is no host:port',
    ),
    (dict(JAX_NUM_PROCESSES='2'), (), 'JAX_COORDINATOR_ADDRESS and JOB_COMPLETION_INDEX not set'),
    (MPI, (), 'OMPI_COMM_WORLD_SIZE=8, but this Open MPI does not give'),
  ],
)
def test_contradictions_give_one_sentence(environ, flags, words):
  with pytest.raises(UserError, match='^[^\n]*$') as error:
    detect(environ, *flags)
  assert words in str(error.value)


def test_the_command_line_exits_with_status_2(tmp_path, capsys):
  flags = ['--config.model=scratch', f'--workdir={tmp_path}', '--coordinator=host', '--processes=2']
  assert main.main([*flags, '--process=0']) == 2
  assert 'error: --coordinator=host is no host:port' in capsys.readouterr().err
  assert not any(tmp_path.iterdir())


def test_join_initializes_jax_and_prints_a_message(monkeypatch, capsys):
  import jax

  calls, settings = [], []
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **kw: calls.append(kw))
  monkeypatch.setattr(jax.config, 'update', lambda *a: settings.append(a))
  monkeypatch.setattr(cluster.watchdog, 'start', lambda silent_s: silent_s)
  alone = dict(TPU_SKIP_MDS_QUERY='1')
  assert cluster.join('', None, None, alone, 60) is None
  assert (calls, settings, capsys.readouterr().out) == ([], [], '')
  cluster.join('', None, None, alone | SLURM | ALL_SEEN | dict(SLURM_STEP_NUM_NODES='2'), 60)
  assert settings == []  # jax's choice of one device each stays
  assert cluster.join('', None, None, alone | SLURM, 60) == 60
  # jax's timeout is longer than ours, as jax aborts with a stack trace.
  patience = dict(initialization_timeout=2 * cluster.JOIN_TIMEOUT_S, heartbeat_timeout_seconds=121)
  assert calls == [dict(cluster_detection_method='slurm') | patience] * 2
  assert ('jax_cuda_visible_devices', 'all') in settings
  assert capsys.readouterr().out.splitlines()[0] == (
    'one of 4 processes, by Slurm; joining the others, for 300 s at most'
  )


def test_a_missing_process_gives_one_sentence():
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    here = f'127.0.0.1:{free.getsockname()[1]}'
  code = (
    f'from jaxrl_llm.distributed import cluster; cluster.JOIN_TIMEOUT_S = 2; '
    f'cluster.join({here!r}, 2, 0, {{}}, 60)'
  )
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
  assert result.returncode == cluster.watchdog.EXIT_PEER_LOST, result.stderr
  assert 'error: not all of the 2 processes came within 2 s;' in result.stderr


@pytest.mark.parametrize('method', ['slurm', 'ompi', 'gketpu', 'gcetpu'])
def test_jax_has_detection_methods_of_these_names(method):
  from jax._src import clusters

  assert method in {kind.name for kind in clusters.ClusterEnv._cluster_types}
