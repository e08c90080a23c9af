"""How the processes of one run find each other: by flags, else by what a TPU pod, Slurm, Kubernetes or Open MPI tells.

`detect` decides from the environment alone and `join` does it. The first that applies wins:

  flags        --coordinator=host:port --processes=N --process=I; --processes=1 alone: no others, wherever this runs
  Open MPI     OMPI_COMM_WORLD_SIZE > 1 (mpirun)
  Slurm        SLURM_NTASKS > 1, in srun
  Kubernetes   JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JOB_COMPLETION_INDEX, which an Indexed Job has,
               or JAX_PROCESS_ID: any other launcher may set these three as well
  TPU          several hosts, as GKE's TPU_WORKER_HOSTNAMES or the metadata server of a TPU VM tell
  else         one process

Where jax can find the others by itself it is asked to, by the name of its method. What jax reads from Kubernetes needs
a package and the right to read pods; three variables do not.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.distributed import watchdog
from jaxrl_llm.types import UserError

JOIN_TIMEOUT_S = 300  # in which all processes must have come
_METADATA = 'http://metadata.google.internal/computeMetadata/v1/instance/attributes/'


class Cluster(NamedTuple):
  """What `detect` found."""

  found_by: str  # 'Slurm'; '' for one process alone
  processes: int
  arguments: dict[str, Any]  # of jax.distributed.initialize
  # jax gives every process of Slurm and Open MPI the one device of its number; True: all that it sees.
  all_devices: bool = True


SINGLE_PROCESS = Cluster('', 1, {})


def join(
  coordinator: str,
  processes: int | None,
  process: int | None,
  environ: Mapping[str, str],
  silent_s: float,
) -> watchdog.Watchdog | None:
  """Joins the other processes of this run, if there are any; says so first, as it may wait for them.

  Call after `import jax` and before any computation. From then on who does not answer for `silent_s` seconds ends
  the run: see peers. None alone. Raises UserError where `detect` does.
  """
  import jax

  found = detect(environ, coordinator, processes, process)
  if not found.found_by:
    return None
  print(
    f'one of {found.processes} processes, by {found.found_by}; joining the others, for {JOIN_TIMEOUT_S} s at most',
    flush=True,
  )
  # jax would abort with a stack trace.
  late = threading.Timer(JOIN_TIMEOUT_S, _late, [found.processes])
  late.daemon = True
  late.start()
  jax.distributed.initialize(
    **found.arguments,
    initialization_timeout=2 * JOIN_TIMEOUT_S,
    heartbeat_timeout_seconds=int(2 * silent_s) + 1,
  )
  late.cancel()
  if found.all_devices:
    jax.config.update('jax_cuda_visible_devices', 'all')
    jax.config.update('jax_rocm_visible_devices', 'all')
  return watchdog.start(silent_s)


def _late(processes: int) -> None:
  print(
    f'error: not all of the {processes} processes came within {JOIN_TIMEOUT_S} s; see what became of the others, and start the '
    'same command again on all of them.',
    file=sys.stderr,
    flush=True,
  )
  os._exit(watchdog.EXIT_PEER_LOST)


def metadata(key: str) -> str:
  """An attribute that the metadata server of a Google VM tells, '' where there is none."""
  request = urllib.request.Request(_METADATA + key, headers={'Metadata-Flavor': 'Google'})
  try:
    with urllib.request.urlopen(request, timeout=5) as answer:
      return answer.read().decode()
  except (OSError, UnicodeDecodeError, urllib.error.URLError):
    return ''


def detect(
  environ: Mapping[str, str],
  coordinator: str = '',
  processes: int | None = None,
  process: int | None = None,
  metadata: Callable[[str], str] = metadata,
) -> Cluster:
  """Which cluster this process is part of.

  `environ` is that of the process after `import jax`, which marks machines without TPU chips (TPU_SKIP_MDS_QUERY), so
  that only TPU VMs ask for `metadata`. Raises UserError for flags and variables that contradict each other.
  """
  if coordinator or processes is not None or process is not None:
    return _flags(coordinator, processes, process)
  for look in (_open_mpi, _slurm, _kubernetes):
    found = look(environ)
    if found.found_by:
      return found
  return _tpu(environ, metadata)


def _flags(coordinator: str, processes: int | None, process: int | None) -> Cluster:
  if not coordinator and processes == 1 and not process:
    return SINGLE_PROCESS
  if not coordinator or processes is None or process is None:
    given = dict(coordinator=coordinator or None, processes=processes, process=process)
    missing = ' and '.join(f'--{name}' for name, value in given.items() if value is None)
    raise UserError(
      f'{missing} not given, but others of --coordinator, --processes and --process are; give all three, '
      'or none of them where the cluster tells, or --processes=1 alone.'
    )
  return _numbered(
    'flags', '--coordinator', coordinator, '--processes', processes, '--process', process
  )


def _numbered(
  found_by: str, where: str, coordinator: str, count: str, processes: int, number: str, process: int
) -> Cluster:
  """All three are known; `where`, `count` and `number` are their names for the user."""
  host, _, port = coordinator.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise UserError(
      f'{where}={coordinator} is no host:port; name the first process and a free port of its machine: '
      f'{where}=host:8476.'
    )
  if not 0 <= process < processes:
    raise UserError(
      f'{number}={process} with {count}={processes}: processes are numbered from 0 to {processes - 1}; '
      'give every process its own.'
    )
  # Without 'deactivate', jax would still ask a cluster that it knows, and take but one of the devices.
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
  here = _number(environ, 'OMPI_COMM_WORLD_LOCAL_SIZE', 1)
  if 'OMPI_MCA_orte_hnp_uri' in environ:
    return Cluster('Open MPI', processes, dict(cluster_detection_method='ompi'), here == 1)
  # From version 5 on it does not tell where the first process is.
  if 'JAX_COORDINATOR_ADDRESS' not in environ:
    raise UserError(
      f'OMPI_COMM_WORLD_SIZE={processes}, but this Open MPI does not tell where the first process is; set '
      'JAX_COORDINATOR_ADDRESS=host:8476 for all of them (mpirun -x), or --processes=1 for a run of its own.'
    )
  rank = _number(environ, 'OMPI_COMM_WORLD_RANK', 0)
  found = _numbered(
    'Open MPI', 'JAX_COORDINATOR_ADDRESS', environ['JAX_COORDINATOR_ADDRESS'],
    'OMPI_COMM_WORLD_SIZE', processes, 'OMPI_COMM_WORLD_RANK', rank,
  )  # fmt: skip
  if here > 1:
    found.arguments['local_device_ids'] = [_number(environ, 'OMPI_COMM_WORLD_LOCAL_RANK', 0)]
  return found._replace(all_devices=here == 1)


def _slurm(environ: Mapping[str, str]) -> Cluster:
  processes = _number(environ, 'SLURM_NTASKS', 1)
  if 'SLURM_JOB_ID' not in environ or processes == 1:
    return SINGLE_PROCESS
  # A batch script and a shell of salloc have the job's number of tasks too, and are one process.
  needed = ('SLURM_STEP_NODELIST', 'SLURM_PROCID', 'SLURM_LOCALID')
  in_step = environ.get('SLURM_STEP_NUM_TASKS', str(processes))
  if in_step != str(processes) or not all(name in environ for name in needed):
    raise UserError(
      f'SLURM_NTASKS={processes}, but srun did not start this process; start it with srun (launch/slurm.sh), '
      'or with --processes=1 for a run of its own.'
    )
  here = -(-processes // _number(environ, 'SLURM_STEP_NUM_NODES', 1))
  # Where Slurm shows each task its own devices alone (--gpus-per-task), these are all there are.
  seen = [d for d in environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if d]
  bound = 0 < len(seen) < max(here, _number(environ, 'SLURM_GPUS_ON_NODE', 1))
  return Cluster('Slurm', processes, dict(cluster_detection_method='slurm'), here == 1 or bound)


def _kubernetes(environ: Mapping[str, str]) -> Cluster:
  """JAX_COORDINATOR_ADDRESS is jax's own variable; alone it says nothing of how many there are."""
  number = 'JAX_PROCESS_ID' if 'JAX_PROCESS_ID' in environ else 'JOB_COMPLETION_INDEX'
  names = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', number)
  if 'JAX_NUM_PROCESSES' not in environ or environ['JAX_NUM_PROCESSES'] == '1':
    return SINGLE_PROCESS
  missing = [name for name in names if name not in environ]
  if missing:
    raise UserError(
      f'JAX_NUM_PROCESSES={environ["JAX_NUM_PROCESSES"]}, but {" and ".join(missing)} not set; set it too, '
      'or take JAX_NUM_PROCESSES away.'
    )
  processes, process = _number(environ, names[1], 1), _number(environ, number, 0)
  found_by = 'Kubernetes' if number == 'JOB_COMPLETION_INDEX' else 'JAX_NUM_PROCESSES'
  return _numbered(found_by, names[0], environ[names[0]], names[1], processes, number, process)


def _tpu(environ: Mapping[str, str], metadata: Callable[[str], str]) -> Cluster:
  if 'tpu' not in environ.get('JAX_PLATFORMS', 'tpu'):
    return SINGLE_PROCESS
  names = environ.get('TPU_PROCESS_ADDRESSES') or environ.get('TPU_WORKER_HOSTNAMES')
  if names:
    hosts = len(names.split(',')) * _number(environ, 'MEGASCALE_NUM_SLICES', 1)
    return (
      Cluster('the TPU pod', hosts, dict(cluster_detection_method='gketpu')) if hosts > 1 else SINGLE_PROCESS
    )
  if 'TPU_SKIP_MDS_QUERY' in environ:
    return SINGLE_PROCESS
  names = metadata('worker-network-endpoints')
  if not names:
    return SINGLE_PROCESS
  slices = re.search(r"^\s*MEGASCALE_NUM_SLICES\s*:\s*'?(\d+)", metadata('tpu-env'), re.M)
  hosts = len(names.split(',')) * (int(slices[1]) if slices else 1)
  return (
    Cluster('the TPU pod', hosts, dict(cluster_detection_method='gcetpu')) if hosts > 1 else SINGLE_PROCESS
  )


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
  value = environ.get(name, str(least))
  if not value.isdecimal() or int(value) < least:
    raise UserError(f'{name}={value} is no whole number from {least} up; mend or unset it.')
  return int(value)
