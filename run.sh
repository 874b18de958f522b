#!/usr/bin/env bash
# One launcher for everything: finds or makes the Python environment, sets the variables that a run needs, prints the
# torchrun line and becomes it. Written for bash 3.2 (macOS) and later.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VENV="$ROOT/.venv"
SHOWN="" # the variables that were set, as they go in front of the printed line

usage() {
  cat <<'USAGE'
Train Qwen3 with torchtitan, on AWS Trainium2 or on a laptop CPU.

  ./run.sh hf|native|nki_moe CONFIG [--section.key value ...]   train (./run.sh native configs/debug.toml)
  ./run.sh hf|native|nki_moe CONFIG --dry_run                   check the fit on the target machine, train nothing
  ./run.sh data CONFIG [...]                                    tokenize beforehand, and show what would be trained on
  ./run.sh parity CONFIG [...]                                  compare the training paths
  ./run.sh doctor                                               print what is installed and what each path will use
  ./run.sh test [pytest arguments]                              run the tests

CONFIG is looked up from the working directory, then from the repository. ./run.sh native --help lists every key.

  NPROC          processes on this machine; default: [launch] nproc_per_node of CONFIG
  NNODES         machines of the run (1); the same command runs on each of them, with
  NODE_RANK        the number of this machine, from 0
  RDZV_ENDPOINT    host:port of machine 0, a port that is free there and open to the others
  PYTHON         the Python to use, or to make .venv with
USAGE
}

say() { echo "run.sh: $*" >&2; }
fail() { say "error: $*" && exit 2; }

# --- Python: an active environment with torch stays as it is, otherwise .venv ---

interpreter() { # name condition -> path of the Python behind the name; fails if the name does not run (a pyenv shim)
  "$1" -c "import sys, importlib.util; del sys.path[0]; print(sys.executable) if $2 else sys.exit(1)" 2>/dev/null
}

checksum() { (cd "$ROOT" && cat requirements-cpu.txt requirements.txt requirements-dev.txt | cksum); }

find_python() { # -> PY, and FOUND: active, venv, or bare (a Python to make .venv with)
  local name names=(python3 python python3.14 python3.13 python3.12 python3.11)
  local right='(3, 11) <= sys.version_info < (3, 15)'
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")
  FOUND=active
  for name in "${names[@]:0:2}"; do
    if PY=$(interpreter "$name" 'importlib.util.find_spec("torch")'); then
      interpreter "$PY" "$right" >/dev/null || fail "$PY has torch, but is $("$PY" -V): 3.11-3.14 is needed."
      return
    fi
  done
  FOUND=venv PY="$VENV/bin/python"
  [ "$(cat "$VENV/complete" 2>/dev/null)" != "$(checksum)" ] || ! "$PY" -c '' 2>/dev/null || return 0
  FOUND=bare
  for name in "${names[@]}"; do
    ! PY=$(interpreter "$name" "$right") || return 0
  done
  fail "no working Python 3.11-3.14 among: ${names[*]}. Install one, or set PYTHON to its path."
}

make_venv() {
  local builder
  if ! (set -o noclobber && echo $$ >"$VENV.lock") 2>/dev/null; then
    builder=$(cat "$VENV.lock")
    ! kill -0 "$builder" 2>/dev/null || fail "another run (process $builder) is making .venv: wait for it."
  fi
  echo $$ >"$VENV.lock"
  trap 'rm -f "$VENV.lock"' EXIT
  if [ -e "$VENV/complete" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
    say "the requirement files changed: updating .venv (once)"
    rm "$VENV/complete"
  else
    say "no environment with torch is active: making .venv with $("$PY" -V) (once, some minutes)"
    rm -rf "$VENV" # what an interrupted run left
    "$PY" -m venv "$VENV" || fail "$PY cannot make a virtual environment. On Debian and Ubuntu install python3-venv."
  fi
  PY="$VENV/bin/python"
  # torch first, so that no other package chooses it. For Linux the default index has the CUDA build: large, and fine
  # on a CPU. Point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at PyTorch's CPU wheels to get the small one.
  local pip=("$PY" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" -r "$ROOT/requirements-cpu.txt" &&
    "${pip[@]}" -r "$ROOT/requirements.txt" -r "$ROOT/requirements-dev.txt" ||
    fail "pip could not install the requirements, see its message above. The same command tries again."
  checksum >"$VENV/complete" # last: without it the folder is never used
  rm "$VENV.lock"
  trap - EXIT
}

environment() { # requirement files ...
  find_python
  if [ $FOUND = bare ]; then
    [ ! -e /dev/neuron0 ] || fail "this machine has Neuron devices, and no environment with torch is active." \
      "Activate the Neuron one (ls -d /opt/aws_neuronx_venv*), or see ./run.sh doctor."
    make_venv
  elif [ $FOUND = active ]; then
    "$PY" "$ROOT/tools/doctor.py" requirements "$@" # says which pip line to run; that line leaves torch alone
  fi
}

# --- environment variables ---

default() { # NAME VALUE: export it unless the user has
  printenv "$1" >/dev/null || { export "$1=$2" && SHOWN+="$1=$(printf %q "$2") "; }
}

variables() { # processes on this machine
  local cores cache="${XDG_CACHE_HOME:-$HOME/.cache}/neuron"
  if [ -e /dev/neuron0 ]; then
    # Names of docs/device_facts.md. Pinning to NUMA nodes is per rank: see common.py.
    # device_facts#numa: 64 processes share 192 vCPUs; with more threads the throughput decays
    default OMP_NUM_THREADS 2
    # device_facts#visible-cores: cores of the whole launch. Never NEURON_RT_VISIBLE_CORES: init_process_group sets
    # it on each rank, and torchtitan misjudges the device if it is there before
    default NEURON_RT_NUM_CORES "$1"
    # device_facts#compile-caches: compiled graphs; the default in /tmp is gone after a reboot, and compiling takes minutes
    default TORCH_NEURONX_NEFF_CACHE_DIR "$cache/neff"
    default TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR "$cache/neff_local"
    # device_facts#compile-caches: NKI kernels have a cache of their own
    default NKI_COMPILE_CACHE_URL "$cache/nki"
    # device_facts#segment-allocator: without it memory fragments, and step 2 fails where step 1 fitted
    default TORCH_NEURONX_SEGMENT_ALLOCATOR_CONFIG kMaxSplitSizeBytes=268435456,kMaxNonSplitRoundingBytes=67108864
    # torchrun kills 30 s after SIGTERM; a big model needs longer to finish the step and save
    default TORCH_ELASTIC_SHUTDOWN_TIMEOUT 120
    if [ "$NNODES" != 1 ]; then
      # device_facts#efa: EFA with RDMA between nodes, safe for forked data loader workers
      default FI_PROVIDER efa
      default FI_EFA_USE_DEVICE_RDMA 1
      default FI_EFA_FORK_SAFE 1
    fi
  fi
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  # processes x threads <= cores: beyond that the processes wait for each other
  default OMP_NUM_THREADS $((cores > $1 ? cores / $1 : 1))
  # tokenizers' threads do not survive a fork, and every data loader worker would warn about it
  default TOKENIZERS_PARALLELISM false
  # gloo looks this machine up by its host name, which a Mac often cannot resolve (pytorch issue 26049)
  [ "$(uname)" != Darwin ] || [ "$NNODES" != 1 ] || default GLOO_SOCKET_IFNAME lo0
}

# --- train ---

find_config() { # name ... -> CONFIG
  case "${1:-}" in "" | -*) fail "which config? For example: ./run.sh native configs/debug.toml" ;; esac
  CONFIG=$1
  [ -f "$CONFIG" ] || CONFIG="$ROOT/$1"
  [ -f "$CONFIG" ] || fail "no config file $1 in $PWD or in $ROOT. Shipped are: $(cd "$ROOT" && echo configs/*.toml)"
}

debug_models() { # arguments ...: made if CONFIG or an argument names them; here, because the ranks would race
  local name stale=""
  [[ "$*" == *debug_models* ]] || grep -Eq '^[^#]*debug_models' "$CONFIG" || return 0
  for name in dense moe text chat; do # those of an older tools/make_debug_models.py are made again
    [ "$ROOT/debug_models/$name" -nt "$ROOT/tools/make_debug_models.py" ] || stale=yes
  done
  [ -n "$stale" ] || return 0
  say "making debug_models/ (once, some seconds)"
  "$PY" "$ROOT/tools/make_debug_models.py"
}

run_ranks() { # torchrun command ...: exits with its exit code
  local child status=0 stopping=""
  # The first rank that fails makes this file and writes its message there: torchrun's own report would bury it.
  RUN_ERROR_FILE=$(mktemp -d)/message
  export RUN_ERROR_FILE
  # A process group of its own: Ctrl-C and a closed terminal reach this script only, not torchrun, which would kill the
  # ranks. They get SIGTERM themselves: they finish the step, save and exit 0. A second signal ends all of it at once.
  # Under nohup the shell never sees SIGHUP, and the run goes on.
  set -m
  "$@" </dev/null &
  child=$!
  set +m
  stop() {
    if [ -n "$stopping" ]; then
      say "stopped at once; the last complete checkpoint stays"
      kill -KILL -- "-$child"
      return
    fi
    stopping=yes
    say "$1: the ranks finish the step and save; once more to end at once"
    pkill -TERM -P "$child" || kill -TERM "$child"
  }
  trap 'stop SIGTERM' TERM
  trap 'stop SIGINT' INT
  trap 'stop SIGHUP' HUP
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done # a trap ends a wait early
  wait "$child" || status=$?
  [ ! -s "$RUN_ERROR_FILE" ] || say "$(cat "$RUN_ERROR_FILE")"
  rm -rf "${RUN_ERROR_FILE%/message}"
  exit "$status"
}

train() { # hf|native|nki_moe CONFIG arguments ...
  local script="$ROOT/train_$1.py" nproc argument previous="" plain="" rank quiet=""
  shift
  if [ "${1:-}" = --help ]; then
    environment requirements.txt
    exec "$PY" "$script" --help
  fi
  find_config "$@"
  shift
  environment requirements.txt
  nproc=$("$PY" -c 'import sys, tomllib
print(tomllib.load(open(sys.argv[1], "rb")).get("launch", {}).get("nproc_per_node", ""))' "$CONFIG" 2>&1) ||
    fail "$CONFIG: ${nproc##*$'\n'}"
  for argument in "$@"; do
    case "$argument" in
      --dry[_-]run | --help) plain=yes ;;
      --launch.nproc[_-]per[_-]node=*) nproc=${argument#*=} ;;
    esac
    [[ $previous != --launch.nproc[_-]per[_-]node ]] || nproc=$argument
    previous=$argument
  done
  nproc=${NPROC:-$nproc} NNODES=${NNODES:-1}
  [[ $nproc =~ ^[1-9][0-9]*$ ]] ||
    fail "'$nproc' processes on this machine? Set NPROC, or [launch] nproc_per_node in $CONFIG, to a number from 1."
  [[ $NNODES =~ ^[1-9][0-9]*$ ]] || fail "NNODES='$NNODES' is not a number from 1."

  debug_models "$@"
  variables "$nproc"
  if [ -n "$plain" ]; then # a dry run makes a fake process group of all ranks, in one process
    set -- "$PY" "$script" "$CONFIG" "$@"
  else
    # Other ranks' stdout goes to files in torchrun's log folder. Their stderr stays: a failing rank says there why.
    for ((rank = 1; rank < nproc; rank++)); do quiet+=",$rank:1"; done
    set -- ${quiet:+--redirects "${quiet#,}"} "$script" "$CONFIG" "$@"
    if [ "$NNODES" = 1 ]; then
      # Port 0 is any free one: two runs do not meet. localhost: host names need not resolve (pytorch issue 150532).
      set -- --rdzv_backend c10d --rdzv_endpoint localhost:0 --local_addr localhost "$@"
    else
      [[ -n ${RDZV_ENDPOINT:-} && ${NODE_RANK:-} =~ ^[0-9]+$ && ${NODE_RANK:-} -lt $NNODES ]] ||
        fail "NNODES=$NNODES needs RDZV_ENDPOINT=host:port of machine 0 and NODE_RANK, here a number below $NNODES."
      # Not c10d: it would number the machines by their host names and ignore NODE_RANK.
      set -- --rdzv_backend static --rdzv_endpoint "$RDZV_ENDPOINT" --node_rank "$NODE_RANK" "$@"
    fi
    set -- "$PY" -m torch.distributed.run --nnodes "$NNODES" --nproc_per_node "$nproc" "$@"
  fi
  echo "$SHOWN$(printf '%q ' "$@")" >&2
  [ -z "$plain" ] || exec "$@"
  run_ranks "$@"
}

command=${1:---help}
case "$command" in
  hf | native | nki_moe) train "$@" ;;
  data | parity)
    find_config "${@:2}"
    environment requirements.txt
    debug_models "$@"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
    exec "$PY" -m "tools.${command/data/prepare_data}" "$CONFIG" "${@:3}"
    ;;
  doctor) # makes nothing: reports what is there
    find_python
    exec "$PY" "$ROOT/tools/doctor.py" "${@:2}"
    ;;
  test)
    shift
    environment requirements.txt requirements-dev.txt
    for argument in "$@"; do # pytest needs the repository as its folder; files keep their meaning
      shift
      [ ! -e "${argument%%::*}" ] || argument="$PWD/$argument"
      set -- "$@" "$argument"
    done
    cd "$ROOT" && exec "$PY" -m pytest "$@"
    ;;
  -h | --help) usage ;;
  *)
    usage >&2
    fail "unknown command '$command'"
    ;;
esac
