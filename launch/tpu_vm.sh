#!/usr/bin/env bash
# Trains on a TPU VM or a pod slice of them, through queued resources. Runs on your machine; needs gcloud.
#
#   BUCKET=my-bucket launch/tpu_vm.sh [--dry-run] create|sync|run|resume|stop|logs|delete [flags of jaxrl_llm.main]
#   BUCKET=my-bucket launch/tpu_vm.sh resume --config=configs/dapo.py --config.model=Qwen/Qwen3-1.7B
#
#   create   requests the slice, waits until it is ACTIVE, and installs the last commit of this clone on every host
#   sync     installs the last commit of this clone on every host, except while training runs there
#   run      starts training on all hosts and watches it; training continues if this command is interrupted
#   resume   sync and run, but creates the slice first if it is missing or was preempted; safe to repeat at any time
#   stop     ends training on all hosts after it has saved its state; resume continues it
#   logs     follows the log of the first host
#   delete   releases the slice; the run directory stays in the bucket
#   --dry-run  prints the commands instead, assuming that the slice is ACTIVE
#
# While run and resume watch, the hosts restart training after a preemption with saved state (status 75) and after the
# death of a process (status 76 on the others), the latter RESTARTS times at most. A preempted slice is requested again.
# Bad input (status 2) and any other failure end the watch with that status.
#
# Settings, as environment variables:
#   BUCKET       a bucket that the slice's service account can write; the run directory is BUCKET/runs/NAME. A bucket
#                with hierarchical namespace renames folders atomically, which checkpoints rely on. Compiled programs
#                are kept in BUCKET/compiled, so that a new slice does not compile again
#   NAME         name of the slice and of the run directory (jaxrl-llm)
#   ZONE         us-central1-a
#   ACCELERATOR  v5litepod-16
#   VERSION      runtime version of the accelerator (v2-alpha-tpuv5-lite)
#   SPOT         1 for spot capacity, else 0 (1)
#   EXTRAS       extras of the package to install (tpu,gym)
#   PYTHON       version of Python that uv installs on the hosts (3.12)
#   RESTARTS     restarts after the death of a process (5)
#   PROJECT      default: gcloud's
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

NAME=${NAME:-jaxrl-llm}
ZONE=${ZONE:-us-central1-a}
ACCELERATOR=${ACCELERATOR:-v5litepod-16}
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
SPOT=${SPOT:-1}
RESTARTS=${RESTARTS:-5}
EXTRAS=${EXTRAS:-tpu,gym}
PYTHON=${PYTHON:-3.12}
BUCKET=${BUCKET:-}
POLL_S=${POLL_S:-30}
where=("--zone=$ZONE")
if [ -n "${PROJECT:-}" ]; then
  where+=("--project=$PROJECT")
fi
dry=0

fail() {
  printf 'tpu_vm.sh: %s\n' "$1" >&2
  exit 2
}

need_gcloud() {
  if [ "$dry" = 0 ] && ! command -v gcloud >/dev/null; then
    fail 'gcloud is not installed; install the Google Cloud CLI, or read the commands with --dry-run.'
  fi
}

# Runs a command, or prints it quoted for a shell.
do_it() {
  if [ "$dry" = 1 ]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

on_host() { # host number or 'all', command
  do_it gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" "--worker=$1" "--command=$2"
}

state() {
  local now errors="${TMPDIR:-/tmp}/jaxrl_llm-$NAME.errors"
  if [ "$dry" = 1 ]; then
    now=ACTIVE
  else
    now=$(gcloud compute tpus queued-resources list "${where[@]}" "--filter=name ~ /$NAME\$" \
      '--format=value(state.state)' 2>"$errors") || now=UNKNOWN
    if [ "$now" = UNKNOWN ]; then
      cat "$errors" >&2
    fi
  fi
  printf '%s\n' "${now:-MISSING}"
}

# Waits until the slice is in one of the given states, and prints that state.
await() {
  local now wanted
  while :; do
    now=$(state)
    for wanted in "$@"; do
      if [ "$now" = "$wanted" ]; then
        printf '%s\n' "$now"
        return 0
      fi
    done
    printf '%s: %s\n' "$NAME" "$now" >&2
    sleep "$POLL_S"
  done
}

create() {
  local spot=() now
  if [ "$SPOT" = 1 ]; then
    spot=(--spot)
  fi
  do_it gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${where[@]}" \
    "--accelerator-type=$ACCELERATOR" "--runtime-version=$VERSION" "${spot[@]}"
  now=$(await ACTIVE FAILED SUSPENDED)
  if [ "$now" != ACTIVE ]; then
    fail "the slice is $now; see gcloud compute tpus queued-resources describe $NAME."
  fi
  install
}

install() {
  local archive="${TMPDIR:-/tmp}/jaxrl_llm-$NAME.tar.gz" clone commit
  clone=$(dirname "${BASH_SOURCE[0]}")/..
  commit=$(git -C "$clone" rev-parse HEAD)
  if [ -n "$(git -C "$clone" status --porcelain)" ]; then
    printf 'tpu_vm.sh: changes that are not committed are not installed; %.12s is.\n' "$commit" >&2
  fi
  do_it git -C "$clone" archive --format=tar.gz "--output=$archive" HEAD
  do_it gcloud compute tpus tpu-vm scp "$archive" "$NAME:jaxrl_llm.tar.gz" "${where[@]}" --worker=all
  on_host all "$(on_each_host "$commit")"
}

# Setup script of a host: gcsfuse, the bucket, this project at a commit with a Python of its own.
on_each_host() {
  printf '%s=%q\n' BUCKET "$BUCKET" EXTRAS "$EXTRAS" PYTHON "$PYTHON" INSTALLED "$1 $EXTRAS $PYTHON"
  cat <<'HOST'
set -eu
exec 9>lock
if ! flock -n 9; then
  echo 'training runs here: its code stays as it is; stop it to install another commit' >&2
  exit 0
fi
if ! command -v gcsfuse >/dev/null; then
  key=/usr/share/keyrings/cloud.google.asc
  curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee "$key" >/dev/null
  echo "deb [signed-by=$key] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo apt-get -q update
  sudo apt-get -q install -y gcsfuse
fi
mkdir -p bucket jaxrl_llm
mountpoint -q bucket || gcsfuse --implicit-dirs --rename-dir-limit=100000 "$BUCKET" bucket
if [ "$(cat installed 2>/dev/null)" = "$INSTALLED" ]; then
  exit 0
fi
export PATH="$HOME/.local/bin:$PATH"
if ! command -v uv >/dev/null; then
  curl -LsSf https://astral.sh/uv/install.sh | sh
fi
# Files of another commit go; the virtual environment stays.
find jaxrl_llm -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
tar -xzf jaxrl_llm.tar.gz -C jaxrl_llm
cd jaxrl_llm
uv venv --quiet --allow-existing --python "$PYTHON" .venv
uv pip install --quiet --python .venv/bin/python -e ".[$EXTRAS]"
printf '%s\n' "$INSTALLED" >../installed
HOST
}

# Training script of a host, detached from the connection that starts it. It restarts after a preemption (75) and after
# deaths: 76 for another process, above 128 for this one, except by SIGINT and SIGTERM. The lock excludes a second
# instance, so run and resume can be repeated while it trains.
training() {
  # shellcheck disable=SC2016  # the hosts expand it
  printf 'cd jaxrl_llm\nnohup flock -n ../lock bash -c %q bash' \
    'left=$1
shift
rm -f ../status ../stopped
export JAX_COMPILATION_CACHE_DIR=$HOME/bucket/compiled
while :; do
  status=0
  .venv/bin/python -m jaxrl_llm.main "$@" || status=$?
  if [ -e ../stopped ]; then status=143 && break; fi
  if [ "$status" = 75 ]; then continue; fi
  if [ "$status" != 76 ] && [ "$status" -le 128 ]; then break; fi
  if [ "$status" = 130 ] || [ "$status" = 143 ] || [ "$left" -le 0 ]; then break; fi
  left=$((left - 1))
done
echo "$status" >../status'
  printf ' %q' "$RESTARTS" "--workdir=../bucket/runs/$NAME" "$@"
  printf ' >>../train.log 2>&1 </dev/null &\n'
}

# Returns the exit status of training on the first host; 75 if the slice is gone.
watch() {
  local status=''
  while [ -z "$status" ]; do
    case $(state) in
      ACTIVE | UNKNOWN) sleep "$POLL_S" ;;
      *) return 75 ;;
    esac
    # An unreachable host has no status: the state of the slice decides.
    status=$(on_host 0 'cat status 2>/dev/null; true') || status=''
  done
  on_host 0 'tail -n 40 train.log'
  return "$status"
}

run() {
  on_host all "$(training "$@")"
  if [ "$dry" = 1 ]; then
    on_host 0 'cat status 2>/dev/null; true'
    return 0
  fi
  local status=0
  watch || status=$?
  if [ "$status" != 75 ]; then
    return "$status"
  fi
  printf '%s was preempted; requesting it again\n' "$NAME"
  resume "$@"
}

# Ends training on all hosts. The pattern does not match the shell that searches for it.
stop() {
  on_host all 'touch stopped; pkill -TERM -f "[j]axrl_llm.main" || true'
}

sync() {
  install
}

resume() {
  if [ "$(state)" = ACTIVE ]; then
    install
  else
    case $(await ACTIVE MISSING SUSPENDED FAILED) in
      ACTIVE) install ;;
      MISSING) create ;;
      *)
        delete
        create
        ;;
    esac
  fi
  run "$@"
}

logs() {
  on_host 0 'tail -n 100 -f train.log'
}

delete() {
  do_it gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force --quiet
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
  create | sync | run | resume)
    if [ -z "$BUCKET" ]; then
      fail 'BUCKET is not set; name the bucket for the run directory, which all hosts write to.'
    fi
    need_gcloud
    "$verb" "$@"
    ;;
  stop | logs | delete)
    need_gcloud
    "$verb"
    ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
