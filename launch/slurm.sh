#!/usr/bin/env bash
# Trains on the GPUs of a Slurm cluster: one process a node, which takes all its GPUs.
#
#   launch/slurm.sh [--dry-run] [flags of jaxrl_llm.main]
#   SBATCH_PARTITION=gpu launch/slurm.sh --config=configs/dapo.py --config.model=Qwen/Qwen3-1.7B --workdir=/shared/runs/qwen
#   sbatch --nodes=4 --gpus-per-node=4 launch/slurm.sh --config=configs/dapo.py --workdir=/shared/runs/dapo
#
# Run from the clone, on a file system that all nodes see, as --workdir must be too. PYTHON names the interpreter
# (.venv/bin/python, made with pip install -e '.[gpu,gym]'). --dry-run prints what would be submitted and run.
# Settings of sbatch are the lines below; its own flags and SBATCH_* variables override them. One process for each GPU instead:
# sbatch --ntasks-per-node=8 (the number of GPUs). The processes find each other by srun's variables.
#
# Three minutes before the time limit, and when the job is preempted, SIGTERM makes the run save and end with status 75;
# the job then goes back to the queue and goes on from there. Where a process died (the others end with status 76), all of
# them are started again in the same job, RESTARTS times at most (5). Any other status ends it.
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
case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
  --dry-run)
    dry=1
    shift
    ;;
esac

# A node that dies is noticed by the others; a process that saves is not to be killed for one that has saved: no
# --kill-on-bad-exit, and ten minutes from the first end to the last.
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

# Slurm runs a copy of this file from a folder of its own.
cd "${SLURM_SUBMIT_DIR:-.}"
# The batch shell gets the signal too when the job is preempted, and has to wait for the step.
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

# 76, or the signal that ended a process, whose status is higher; not the signals of who wants an end.
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
