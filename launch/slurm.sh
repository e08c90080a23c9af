#!/usr/bin/env bash
# Trains on the GPUs of a Slurm cluster: one process per node, with all GPUs of the node.
#
#   launch/slurm.sh [--dry-run] [flags of jaxrl_llm.main]
#   SBATCH_PARTITION=gpu launch/slurm.sh --config=configs/dapo.py --config.model=Qwen/Qwen3-1.7B --workdir=/shared/runs/qwen
#   sbatch --nodes=4 --gpus-per-node=4 launch/slurm.sh --config=configs/dapo.py --workdir=/shared/runs/dapo
#
# Run it from the clone. The clone and --workdir must lie on a file system that all nodes share. PYTHON names the
# interpreter (.venv/bin/python, after pip install -e '.[gpu,gym]'). --dry-run prints the submission and the command.
# The sbatch settings below are defaults; flags of sbatch and SBATCH_* variables override them. For one process per GPU:
# sbatch --ntasks-per-node=8 (the number of GPUs). Processes find each other from srun's environment.
#
# Three minutes before the time limit, and at a preemption, SIGTERM makes the run save and exit with status 75; the job is
# then requeued and resumes. If a process dies (the others exit with status 76), all of them restart in the same job,
# RESTARTS times at most (5). Any other status ends the job.
#SBATCH --job-name=jaxrl_llm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

usage() {
  sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

dry=0
# --dry-run counts wherever it stands: overlooked, it would start what it was to print.
arguments=()
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then
    dry=1
  else
    arguments+=("$argument")
  fi
done
set -- ${arguments[@]+"${arguments[@]}"}
case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
esac

# The processes detect a dead node themselves. A process that is still saving must not be killed because another has
# finished: no --kill-on-bad-exit, and ten minutes between the first exit and the last.
step=(srun --kill-on-bad-exit=0 --wait=600 "${PYTHON:-.venv/bin/python}" -m jaxrl_llm.main "$@")

if [ "$dry" = 1 ]; then
  printf '%q ' sbatch "${BASH_SOURCE[0]}" "$@"
  printf '\n'
  sed -n 's/^#SBATCH /  /p' "${BASH_SOURCE[0]}"
  printf '%q ' "${step[@]}"
  printf '\n'
  exit 0
fi
if [ -z "${SLURM_JOB_ID:-}" ]; then
  exec sbatch "${BASH_SOURCE[0]}" "$@"
fi

# Slurm runs a copy of this file from its spool directory.
cd "${SLURM_SUBMIT_DIR:-.}"
# A preemption signals the batch shell, too; it must wait for the step.
trap ':' TERM
train() {
  status=0
  "${step[@]}" &
  wait $! || status=$?
  while kill -0 $! 2>/dev/null; do
    status=0
    wait $! || status=$?
  done
}

# True for 76 and for deaths by a signal, except SIGINT and SIGTERM.
lost() {
  [ "$status" = 76 ] || { [ "$status" -gt 128 ] && [ "$status" != 130 ] && [ "$status" != 143 ]; }
}

left=${RESTARTS:-5}
train
while lost && [ "$left" -gt 0 ]; do
  printf 'slurm.sh: status %s: a process died; starting all again\n' "$status" >&2
  left=$((left - 1))
  train
done
if [ "$status" = 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
