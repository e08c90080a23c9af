"""Discovery of the processes of one run: from flags, or from a TPU pod, Slurm, Kubernetes or Open MPI.

`detect` decides from the environment alone, and `join` connects. The first that applies wins:

  flags        --coordinator=host:port --processes=N --process=I; --processes=1 alone forces single-process mode
  Open MPI     OMPI_COMM_WORLD_SIZE > 1 (mpirun)
  Slurm        SLURM_NTASKS > 1, in srun
  Kubernetes   JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JOB_COMPLETION_INDEX, which an Indexed Job has,
               or JAX_PROCESS_ID: any other launcher may set these three as well
  TPU          several hosts, by GKE's TPU_WORKER_HOSTNAMES or the metadata server of a TPU VM
  else         one process

If jax has a detection method of its own, `join` passes its name to jax. On Kubernetes that method needs a package and
permission to read pods, which the three variables do not.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxrl_llm.distributed import watchdog
from jaxrl_llm.types import JsonObject, UserError

JOIN_TIMEOUT_S = 300  # for all processes to connect
_METADATA = 'http://metadata.google.internal/computeMetadata/v1/instance/attributes/'


class Cluster(NamedTuple):
  """The processes of a run, as found by `detect`."""

  found_by: str  # 'Slurm'; '' for a single process
  processes: int
  arguments: JsonObject  # of jax.distributed.initialize
  # Whether a process uses all visible devices. By default, jax gives each process of Slurm and Open MPI one device.
  all_devices: bool = True


SINGLE_PROCESS = Cluster('', 1, {})


def join(
  coordinator: str,
  processes: int | None,
  process: int | None,
  environ: Mapping[str, str],
  silent_s: float,
) -> watchdog.Watchdog | None:
  """Connect to the other processes of this run; returns the watchdog, or None for a single process.

  Call after `import jax` and before any computation. From then on, a process that does not answer for `silent_s`
  seconds ends the run: see `watchdog`. Raises UserError as `detect` does.
  """
  import jax

  cluster = detect(environ, coordinator, processes, process)
  if not cluster.found_by:
    return None
  print(
    f'one of {cluster.processes} processes, by {cluster.found_by}; joining the others, for {JOIN_TIMEOUT_S} s at most',
    flush=True,
  )
  # On its own timeout, jax would abort with a stack trace.
  timer = threading.Timer(JOIN_TIMEOUT_S, _exit_on_timeout, [cluster.processes])
  timer.daemon = True
  timer.start()
  jax.distributed.initialize(
    **cluster.arguments,
    initialization_timeout=2 * JOIN_TIMEOUT_S,
    heartbeat_timeout_seconds=int(2 * silent_s) + 1,
  )
  timer.cancel()
  if cluster.all_devices:
    jax.config.update('jax_cuda_visible_devices', 'all')
    jax.config.update('jax_rocm_visible_devices', 'all')
  return watchdog.start(silent_s)


def _exit_on_timeout(processes: int) -> None:
  print(
    f'error: not all of the {processes} processes came within {JOIN_TIMEOUT_S} s; check the logs of the others, and '
    'start the same command again on all of them.',
    file=sys.stderr,
    flush=True,
  )
  os._exit(watchdog.EXIT_PEER_LOST)


def metadata(key: str) -> str:
  """An attribute from the metadata server of a Google VM, '' without one."""
  request = urllib.request.Request(_METADATA + key, headers={'Metadata-Flavor': 'Google'})
  try:
    with urllib.request.urlopen(request, timeout=5) as response:
      return response.read().decode()
  except (OSError, UnicodeDecodeError, urllib.error.URLError):
    return ''


def detect(
  environ: Mapping[str, str],
  coordinator: str = '',
  processes: int | None = None,
  process: int | None = None,
  metadata: Callable[[str], str] = metadata,
) -> Cluster:
  """The cluster that this process is part of.

  `environ`: the environment after `import jax`, which marks machines without TPU chips (TPU_SKIP_MDS_QUERY), so that
  only TPU VMs query `metadata`. Raises UserError for flags and variables that contradict each other.
  """
  if coordinator or processes is not None or process is not None:
    return _from_flags(coordinator, processes, process)
  for detect_launcher in (_open_mpi, _slurm, _kubernetes):
    cluster = detect_launcher(environ)
    if cluster.found_by:
      return cluster
  return _tpu(environ, metadata)


def _from_flags(coordinator: str, processes: int | None, process: int | None) -> Cluster:
  if not coordinator and processes == 1 and not process:
    return SINGLE_PROCESS
  if not coordinator or processes is None or process is None:
    flags = dict(coordinator=coordinator or None, processes=processes, process=process)
    missing = ' and '.join(f'--{name}' for name, value in flags.items() if value is None)
    raise UserError(
      f'{missing} not given, but others of --coordinator, --processes and --process are; give all three, '
      'or none of them for detection by the cluster, or --processes=1 alone.'
    )
  names = _SettingNames('--coordinator', '--processes', '--process')
  return _from_coordinator('flags', names, coordinator, processes, process)


class _SettingNames(NamedTuple):
  """The flags or variables that set a cluster, for messages to the user."""

  coordinator: str
  processes: str
  process: str


def _from_coordinator(
  found_by: str, names: _SettingNames, coordinator: str, processes: int, process: int
) -> Cluster:
  """A cluster with known coordinator, number of processes and index. Raises UserError for values out of range."""
  host, _, port = coordinator.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise UserError(
      f'{names.coordinator}={coordinator} is no host:port; name the first process and a free port of its machine: '
      f'{names.coordinator}=host:8476.'
    )
  if not 0 <= process < processes:
    raise UserError(
      f'{names.process}={process} with {names.processes}={processes}: processes are numbered from 0 to '
      f'{processes - 1}; give every process its own.'
    )
  # Without 'deactivate', jax would still query a cluster that it detects, and use only one of the devices.
  arguments = dict(
    coordinator_address=coordinator,
    num_processes=processes,
    process_id=process,
    cluster_detection_method='deactivate',
  )
  return Cluster(found_by, processes, arguments)


def _open_mpi(environ: Mapping[str, str]) -> Cluster:
  processes = _number(environ, 'OMPI_COMM_WORLD_SIZE', 1)
  if processes == 1:
    return SINGLE_PROCESS
  local_processes = _number(environ, 'OMPI_COMM_WORLD_LOCAL_SIZE', 1)
  if 'OMPI_MCA_orte_hnp_uri' in environ:
    method = dict(cluster_detection_method='ompi')
    return Cluster('Open MPI', processes, method, local_processes == 1)
  # From version 5 on, Open MPI does not publish the address of the first process.
  if 'JAX_COORDINATOR_ADDRESS' not in environ:
    raise UserError(
      f'OMPI_COMM_WORLD_SIZE={processes}, but this Open MPI does not give the address of the first process; set '
      'JAX_COORDINATOR_ADDRESS=host:8476 for all of them (mpirun -x), or --processes=1 for a run of its own.'
    )
  rank = _number(environ, 'OMPI_COMM_WORLD_RANK', 0)
  names = _SettingNames('JAX_COORDINATOR_ADDRESS', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK')
  cluster = _from_coordinator(
    'Open MPI', names, environ['JAX_COORDINATOR_ADDRESS'], processes, rank
  )
  if local_processes > 1:
    cluster.arguments['local_device_ids'] = [_number(environ, 'OMPI_COMM_WORLD_LOCAL_RANK', 0)]
  return cluster._replace(all_devices=local_processes == 1)


def _slurm(environ: Mapping[str, str]) -> Cluster:
  processes = _number(environ, 'SLURM_NTASKS', 1)
  if 'SLURM_JOB_ID' not in environ or processes == 1:
    return SINGLE_PROCESS
  # A batch script and a shell of salloc have the job's number of tasks too, but are single processes.
  required = ('SLURM_STEP_NODELIST', 'SLURM_PROCID', 'SLURM_LOCALID')
  step_tasks = environ.get('SLURM_STEP_NUM_TASKS', str(processes))
  if step_tasks != str(processes) or not all(name in environ for name in required):
    raise UserError(
      f'SLURM_NTASKS={processes}, but srun did not start this process; start it with srun (launch/slurm.sh), '
      'or with --processes=1 for a run of its own.'
    )
  local_processes = -(-processes // _number(environ, 'SLURM_STEP_NUM_NODES', 1))
  # With --gpus-per-task, a task sees only its own devices, and uses all of them.
  visible = [d for d in environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if d]
  bound = 0 < len(visible) < max(local_processes, _number(environ, 'SLURM_GPUS_ON_NODE', 1))
  method = dict(cluster_detection_method='slurm')
  return Cluster('Slurm', processes, method, local_processes == 1 or bound)


def _kubernetes(environ: Mapping[str, str]) -> Cluster:
  """JAX_COORDINATOR_ADDRESS is jax's own variable; without JAX_NUM_PROCESSES it is ignored here."""
  index = 'JAX_PROCESS_ID' if 'JAX_PROCESS_ID' in environ else 'JOB_COMPLETION_INDEX'
  names = _SettingNames('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', index)
  if 'JAX_NUM_PROCESSES' not in environ or environ['JAX_NUM_PROCESSES'] == '1':
    return SINGLE_PROCESS
  missing = [name for name in names if name not in environ]
  if missing:
    raise UserError(
      f'JAX_NUM_PROCESSES={environ["JAX_NUM_PROCESSES"]}, but {" and ".join(missing)} not set; set it too, '
      'or unset JAX_NUM_PROCESSES.'
    )
  processes, process = _number(environ, names.processes, 1), _number(environ, index, 0)
  found_by = 'Kubernetes' if index == 'JOB_COMPLETION_INDEX' else 'JAX_NUM_PROCESSES'
  return _from_coordinator(found_by, names, environ[names.coordinator], processes, process)


def _tpu(environ: Mapping[str, str], metadata: Callable[[str], str]) -> Cluster:
  if 'tpu' not in environ.get('JAX_PLATFORMS', 'tpu'):
    return SINGLE_PROCESS
  hostnames = environ.get('TPU_PROCESS_ADDRESSES') or environ.get('TPU_WORKER_HOSTNAMES')
  if hostnames:
    hosts = len(hostnames.split(',')) * _number(environ, 'MEGASCALE_NUM_SLICES', 1)
    return _tpu_pod(hosts, 'gketpu')
  if 'TPU_SKIP_MDS_QUERY' in environ:
    return SINGLE_PROCESS
  endpoints = metadata('worker-network-endpoints')
  if not endpoints:
    return SINGLE_PROCESS
  slices = re.search(r"^\s*MEGASCALE_NUM_SLICES\s*:\s*'?(\d+)", metadata('tpu-env'), re.M)
  return _tpu_pod(len(endpoints.split(',')) * (int(slices[1]) if slices else 1), 'gcetpu')


def _tpu_pod(hosts: int, method: str) -> Cluster:
  if hosts <= 1:
    return SINGLE_PROCESS
  return Cluster('the TPU pod', hosts, dict(cluster_detection_method=method))


def _number(environ: Mapping[str, str], name: str, minimum: int) -> int:
  value = environ.get(name, str(minimum))
  if not value.isdecimal() or int(value) < minimum:
    raise UserError(f'{name}={value} is no whole number from {minimum} up; correct or unset it.')
  return int(value)
