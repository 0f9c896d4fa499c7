#!/usr/bin/env bash
# Trains under Open MPI, which only starts the processes:
#
#     bash launch/openmpi.sh -n 16 --hostfile hosts -- --config.parallel.dp=8 --config.train.batch=64
#
# Options before -- go to mpirun, those after it to `python -m optimus_jax.train`. Process 0 runs on
# the first host of the hostfile (MASTER_ADDR names another), on a port that JAX_COORDINATOR_PORT sets.
# Each process's output is also under logs/ (OPTIMUS_LOGS names another folder), on a disk that all
# hosts share or on each host its own processes'.
set -euo pipefail

usage="usage: bash launch/openmpi.sh -n N [mpirun's options] -- [train's options]"
options=()
while [[ $# -gt 0 && "$1" != "--" ]]; do options+=("$1"); shift; done
if [[ $# -eq 0 || ${#options[@]} -eq 0 ]]; then
  echo "$usage" >&2
  exit 2
fi
shift
command -v mpirun >/dev/null || { echo "no mpirun: install Open MPI" >&2; exit 2; }

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${OPTIMUS_PYTHON:-$root/.venv/bin/python}"

first=127.0.0.1
for ((i = 0; i < ${#options[@]}; i++)); do
  case "${options[i]}" in
  --hostfile | --machinefile | -hostfile | -machinefile)
    first="$(sed -E 's/#.*//; /^[[:space:]]*$/d' "${options[i + 1]}" | head -1 | awk '{print $1}')"
    ;;
  --host | -host | -H)
    first="${options[i + 1]%%,*}"
    first="${first%%:*}"
    ;;
  esac
done
port="${JAX_COORDINATOR_PORT:-$((61440 + $$ % 4096))}"
export JAX_COORDINATOR_ADDRESS="${MASTER_ADDR:-$first}:$port"

# mpirun hands no variables on to other hosts by itself; what the user sets there wins.
# A run that is started again reads the programs that it compiled before.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
exported=()
export OPTIMUS_TIMESTAMPS="${OPTIMUS_TIMESTAMPS-1}"
for name in $(compgen -e | grep -E '^(PYTHONPATH$|(NCCL|XLA|JAX|OPTIMUS|CUDA_DEVICE)_)'); do
  [[ " ${options[*]}" == *" $name="* || " ${options[*]} " == *" $name "* ]] || exported+=(-x "$name")
done

# Each process has files of its own, stdout and stderr in rank.N; what it says is here too.
logs="${OPTIMUS_LOGS:-logs}"
[[ "$logs" == /* ]] || logs="$PWD/$logs"
files=(--output-filename "$logs/openmpi-$(date +%Y%m%d-%H%M%S)-$$:nojobid")
[[ " ${options[*]} " == *" --output-filename "* ]] && files=()

# A process that fails ends the others; each stays unbound, since XLA has threads of its own.
exec mpirun --bind-to none "${exported[@]}" "${files[@]}" "${options[@]}" \
  "$python" -u -m optimus_jax.train "$@"
