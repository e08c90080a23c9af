#!/usr/bin/env bash
# Trains on a TPU slice of a GKE cluster: fills launch/gke_jobset.yaml and applies it with kubectl.
#
#   BUCKET=my-bucket IMAGE=… launch/gke.sh [--dry-run] run|logs|delete [flags of jaxrl_llm.main]
#
#   run      creates the JobSet; the same command after a delete resumes the run
#   logs     follows the log of the first host
#   delete   deletes the JobSet; the run directory stays in the bucket
#   --dry-run  prints the JobSet and the commands instead; validate it with kubectl apply --dry-run=server -f -
#
# Settings, as environment variables, documented in launch/gke_jobset.yaml. BUCKET and IMAGE must be set; defaults of the others:
# NAME (jaxrl-llm), ACCOUNT (default), ACCELERATOR (tpu-v5-lite-podslice), TOPOLOGY (4x4), HOSTS (4), CHIPS (4), RESTARTS (100).
# A minimal image:
#   FROM python:3.12
#   COPY . /jaxrl_llm
#   WORKDIR /jaxrl_llm
#   RUN pip install -e '.[tpu,gym]'
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

export NAME=${NAME:-jaxrl-llm} ACCOUNT=${ACCOUNT:-default}
export ACCELERATOR=${ACCELERATOR:-tpu-v5-lite-podslice} TOPOLOGY=${TOPOLOGY:-4x4}
export HOSTS=${HOSTS:-4} CHIPS=${CHIPS:-4} RESTARTS=${RESTARTS:-100}
export IMAGE=${IMAGE:-} BUCKET=${BUCKET:-}
dry=0

do_it() {
  if [ "$dry" = 1 ]; then
    printf '# %s\n' "$*"
  else
    "$@"
  fi
}

fill() {
  local text name flag flags=''
  for flag in "$@"; do
    flag=${flag//\\/\\\\}
    flags+="${flags:+, }\"${flag//\"/\\\"}\""
  done
  text=$(grep -v '^#' "$(dirname "${BASH_SOURCE[0]}")/gke_jobset.yaml")
  for name in NAME IMAGE BUCKET ACCOUNT ACCELERATOR TOPOLOGY HOSTS CHIPS RESTARTS; do
    if [ -z "${!name}" ]; then
      printf 'gke.sh: %s is not set; see launch/gke_jobset.yaml.\n' "$name" >&2
      exit 2
    fi
    text=${text//"\${$name}"/"${!name}"}
  done
  printf '%s\n' "${text//"\${FLAGS}"/"$flags"}"
}

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
verb=${1:-}
shift || true
case $verb in
  run)
    jobset=$(fill "$@")
    do_it kubectl apply -f - <<<"$jobset"
    if [ "$dry" = 1 ]; then
      printf '%s\n' "$jobset"
    fi
    ;;
  logs)
    do_it kubectl logs -f -c train \
      -l "jobset.sigs.k8s.io/jobset-name=$NAME,batch.kubernetes.io/job-completion-index=0"
    ;;
  delete) do_it kubectl delete jobset "$NAME" ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
