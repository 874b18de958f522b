#!/usr/bin/env bash
# One launcher for everything: finds or makes the Python environment, sets the environment variables that a run needs,
# prints the torchrun line and becomes it. Written for bash 3.2 (macOS) and later.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'USAGE'
Train Qwen3 with torchtitan, on AWS Trainium2 or on a laptop CPU.

  ./run.sh hf|native|nki_moe CONFIG [--section.key value ...]   train (./run.sh native configs/debug.toml)
  ./run.sh hf|native|nki_moe CONFIG --dry_run                   check the fit on the target machine, train nothing
  ./run.sh parity CONFIG [...]                                  compare the training paths
  ./run.sh doctor                                               print what is installed and what each path will use
  ./run.sh test [pytest arguments]                              run the tests

CONFIG is looked up from the working directory, then from the repository. ./run.sh native --help lists every key.

  NPROC          processes on this machine; default: [launch] nproc_per_node of CONFIG
  NNODES         machines of the run (1). The same command runs on each of them
  NODE_RANK      number of this machine, from 0. Needed if NNODES > 1, as is:
  RDZV_ENDPOINT  host:port of machine 0, with a port that is free there and open to the others
  PYTHON         the Python to use, or to make .venv with
USAGE
}

say() { echo "run.sh: $*" >&2; }
fail() {
  say "error: $*"
  exit 2
}
# Export NAME=VALUE unless the user has set NAME; what was set is shown in front of the torchrun line.
SHOWN=""
default() {
  printenv "$1" >/dev/null && return
  export "$1=$2"
  SHOWN+="$1=$(printf %q "$2") "
}

# --- environment: an active one with torch stays untouched, otherwise .venv ---

good_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }
has_torch() { "$1" -c 'import sys, importlib.util; sys.exit(not importlib.util.find_spec("torch"))' 2>/dev/null; }

find_python() { # -> PY, and FOUND: active, venv, or bare (a Python to make .venv with)
  local candidate venv="$ROOT/.venv" active=(python3 python) any=(python3 python python3.14 python3.13 python3.12 python3.11)
  if [ -n "${PYTHON:-}" ]; then
    active=("$PYTHON") any=("$PYTHON")
  fi
  FOUND=active
  for candidate in "${active[@]}"; do
    if has_torch "$candidate"; then
      PY=$(command -v "$candidate")
      good_python "$PY" || fail "$PY has torch, but is $("$PY" -V 2>&1) and 3.11-3.14 is needed. Activate another environment."
      return
    fi
  done
  FOUND=venv
  if [ "$(cat "$venv/complete" 2>/dev/null)" = "$(checksum)" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    PY="$venv/bin/python"
    return
  fi
  FOUND=bare
  for candidate in "${any[@]}"; do
    if good_python "$candidate"; then # runs it: a name on the PATH may be a shim of a version that is not there
      PY=$(command -v "$candidate")
      return
    fi
  done
  fail "no working Python 3.11-3.14 among: ${any[*]}. Install one, or set PYTHON to its path."
}

checksum() { (cd "$ROOT" && cat requirements-cpu.txt requirements.txt requirements-dev.txt | cksum); }

make_venv() { # in place, or anew if an earlier build did not finish
  local venv="$ROOT/.venv" builder
  if ! (set -o noclobber && echo $$ >"$ROOT/.venv.lock") 2>/dev/null; then
    builder=$(cat "$ROOT/.venv.lock")
    ! kill -0 "$builder" 2>/dev/null || fail "another run (process $builder) is making .venv. Wait until it is done."
    echo $$ >"$ROOT/.venv.lock" # left behind by a run that was killed
  fi
  trap 'rm -f "$ROOT/.venv.lock"' EXIT
  if [ -e "$venv/complete" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    say "the requirements changed: updating .venv (once)"
  else
    say "no Python environment with torch is active: making .venv with $("$PY" -V) (once, some minutes)"
    rm -rf "$venv"
    "$PY" -m venv "$venv" || fail "$PY cannot make virtual environments. On Debian and Ubuntu install python3-venv."
  fi
  rm -f "$venv/complete"
  PY="$venv/bin/python"
  # On Linux the default index has torch with CUDA: large, but fine on a CPU too. Point PIP_EXTRA_INDEX_URL or
  # PIP_FIND_LINKS at PyTorch's CPU wheels to get the small build. torch comes first, so that nothing else chooses it.
  "$PY" -m pip install --quiet --disable-pip-version-check -r "$ROOT/requirements-cpu.txt" &&
    "$PY" -m pip install --quiet --disable-pip-version-check -r "$ROOT/requirements.txt" -r "$ROOT/requirements-dev.txt" ||
    fail "pip could not install the requirements (its message is above). Run the same command again to retry."
  checksum >"$venv/complete" # last: a folder without it is never used
  rm -f "$ROOT/.venv.lock"
  trap - EXIT
}

environment() { # requirement files ... -> PY with everything installed
  find_python
  if [ "$FOUND" = bare ]; then
    # Making a CPU environment here would hide the real one.
    [ ! -e /dev/neuron0 ] || fail "this machine has Neuron devices, but no environment with torch is active. Activate the" \
      "Neuron one, for example: source $(ls -d /opt/aws_neuronx_venv*torch*/bin/activate 2>/dev/null | head -1)"
    make_venv
  elif [ "$FOUND" = active ]; then
    "$PY" "$ROOT/check.py" requirements "$@" # prints the pip line for what is missing; never one that names torch
  fi
}

# --- environment variables, each only if the user has not set it ---

variables() { # processes on this machine
  local cores cache="${XDG_CACHE_HOME:-$HOME/.cache}/neuron"
  if [ -e /dev/neuron0 ]; then
    # The number is the section of trainium_facts, then comes its public source. NUMA pinning is per rank: see common.py.
    # 9.18 (measured on trn2): 64 processes share 192 vCPUs, and more threads let the throughput decay
    default OMP_NUM_THREADS 2
    # 4a (AWS's torchtitan tutorial): cores of the whole launch. Never NEURON_RT_VISIBLE_CORES: init_process_group sets it
    # for each rank, and torchtitan misjudges the device if it is there before
    default NEURON_RT_NUM_CORES "$1"
    # 5 (TorchNeuron source): compiled graphs; the default in /tmp is gone after a reboot, and compiling takes minutes
    default TORCH_NEURONX_NEFF_CACHE_DIR "$cache/neff"
    default TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR "$cache/neff_local"
    # 5 (TorchNeuron source): NKI kernels have a cache of their own
    default NKI_COMPILE_CACHE_URL "$cache/nki"
    # 2 (measured on trn2): without it memory fragments, and step 2 fails where step 1 fitted
    default TORCH_NEURONX_SEGMENT_ALLOCATOR_CONFIG kMaxSplitSizeBytes=268435456,kMaxNonSplitRoundingBytes=67108864
    # SIGTERM means finish the step and save; torchrun's 30 s until it kills are too short for a big model
    default TORCH_ELASTIC_SHUTDOWN_TIMEOUT 120
    if [ "$NNODES" -gt 1 ]; then
      # 4d (Neuron documentation, TorchNeuron source): EFA with RDMA between nodes, safe for forked data loader workers
      default FI_PROVIDER efa
      default FI_EFA_USE_DEVICE_RDMA 1
      default FI_EFA_FORK_SAFE 1
    fi
  fi
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  # processes x threads <= cores: beyond that every process waits for the others
  default OMP_NUM_THREADS $((cores > $1 ? cores / $1 : 1))
  # tokenizers' threads do not survive a fork, and warn about it in every data loader worker
  default TOKENIZERS_PARALLELISM false
  if [ "$(uname)" = Darwin ] && [ "$NNODES" = 1 ]; then
    # gloo looks itself up by host name, which a Mac often cannot resolve (pytorch issue 26049)
    default GLOO_SOCKET_IFNAME lo0
  fi
}

# --- train ---

find_config() { # name -> CONFIG, with the debug models that it may name
  CONFIG=${1:-}
  case "$CONFIG" in "" | -*) fail "which config? For example: ./run.sh native configs/debug.toml" ;; esac
  [ -f "$CONFIG" ] || CONFIG="$ROOT/$1"
  [ -f "$CONFIG" ] || fail "no config file $1 in $PWD or in $ROOT. Shipped are: $(cd "$ROOT" && echo configs/*.toml)"
}

debug_models() { # arguments ...: make debug_models/ if CONFIG or an argument names it. Before torchrun: ranks would race
  local name
  case "$*" in *debug_models*) ;; *) grep -Eq '^[^#]*debug_models' "$CONFIG" || return 0 ;; esac
  for name in dense moe text; do
    if [ ! -d "$ROOT/debug_models/$name" ]; then
      say "making debug_models/ (once, some seconds)"
      "$PY" "$ROOT/make_debug_models.py"
      return
    fi
  done
}

train() { # hf|native|nki_moe CONFIG arguments ...
  local script="$ROOT/train_$1.py" nproc argument previous="" plain="" rank quiet=""
  shift
  case "${1:-}" in
    -h | --help) environment "$ROOT/requirements.txt" && exec "$PY" "$script" --help ;;
  esac
  find_config "$@"
  shift
  environment "$ROOT/requirements.txt"
  nproc=$("$PY" -c 'import sys, tomllib
print(tomllib.load(open(sys.argv[1], "rb")).get("launch", {}).get("nproc_per_node", ""))' "$CONFIG" 2>&1) ||
    fail "$CONFIG: ${nproc##*$'\n'}"
  for argument in "$@"; do
    case "$argument" in --dry_run | --dry-run | -h | --help) plain=yes ;; esac
    case "$previous" in --launch.nproc[_-]per[_-]node) nproc=$argument ;; esac
    case "$argument" in --launch.nproc[_-]per[_-]node=*) nproc=${argument#*=} ;; esac
    previous=$argument
  done
  nproc=${NPROC:-$nproc}
  NNODES=${NNODES:-1}
  [[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "processes on this machine: '$nproc' is not a whole number of 1 or more. Set NPROC," \
    "or [launch] nproc_per_node in $CONFIG."
  [[ $NNODES =~ ^[1-9][0-9]*$ ]] || fail "NNODES='$NNODES' is not a whole number of 1 or more."

  debug_models "$@"
  variables "$nproc"
  if [ -n "$plain" ]; then # a dry run makes a fake process group of all ranks, in one process
    set -- "$PY" "$script" "$CONFIG" "$@"
  else
    # Other ranks' stdout goes to files in torchrun's log folder. Their stderr stays: the failing rank says why there.
    for ((rank = 1; rank < nproc; rank++)); do quiet+=",$rank:1"; done
    set -- ${quiet:+--redirects "${quiet#,}"} "$script" "$CONFIG" "$@"
    if [ "$NNODES" = 1 ]; then
      # Port 0 is any free one, so that two runs do not meet. With localhost nothing looks the host name up, which some
      # machines cannot resolve (pytorch issue 150532).
      set -- --rdzv_backend c10d --rdzv_endpoint localhost:0 --local_addr localhost "$@"
    else
      [ -n "${RDZV_ENDPOINT:-}" ] && [[ ${NODE_RANK:-} =~ ^[0-9]+$ ]] && [ "$NODE_RANK" -lt "$NNODES" ] ||
        fail "NNODES=$NNODES needs RDZV_ENDPOINT=host:port of machine 0, and NODE_RANK=0 ... $((NNODES - 1)) on the machines."
      # static, not c10d: c10d numbers the machines by host name, so that NODE_RANK would be ignored
      set -- --rdzv_backend static --rdzv_endpoint "$RDZV_ENDPOINT" --node_rank "$NODE_RANK" "$@"
    fi
    set -- "$PY" -m torch.distributed.run --nnodes "$NNODES" --nproc_per_node "$nproc" "$@"
  fi
  echo "$SHOWN$(printf '%q ' "$@")" >&2
  exec "$@" # torchrun passes signals on to the ranks, and its exit code is ours
}

# --- test ---

run_tests() { # pytest arguments ...
  local argument arguments=()
  for argument in "$@"; do # files given from the working directory keep their meaning
    [ ! -e "${argument%%::*}" ] || argument="$PWD/$argument"
    arguments+=("$argument")
  done
  cd "$ROOT"
  exec "$PY" -m pytest ${arguments[@]+"${arguments[@]}"}
}

command=${1:---help}
case "$command" in
  hf | native | nki_moe) train "$@" ;;
  parity)
    shift
    find_config "$@"
    environment "$ROOT/requirements.txt"
    debug_models "$@"
    exec "$PY" "$ROOT/check.py" parity "$CONFIG" "${@:2}"
    ;;
  doctor) # reports what is there: makes nothing
    find_python
    exec "$PY" "$ROOT/check.py" doctor
    ;;
  test)
    shift
    environment "$ROOT/requirements.txt" "$ROOT/requirements-dev.txt"
    run_tests "$@"
    ;;
  -h | --help) usage ;;
  *)
    usage >&2
    fail "unknown command '$command'"
    ;;
esac
