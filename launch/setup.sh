#!/usr/bin/env bash
# Makes .venv with the pinned packages; at once done where it already has them.
# PYTHON names the interpreter to use (default: python3). jax comes with CUDA where nvidia-smi lists
# a GPU, and with --cuda: for a login node or an image, whose programs will run where there are some.
# What has CUDA keeps it. --pins only prints what it would install.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
base="${PYTHON:-python3}"
python=.venv/bin/python
stamp=.venv/installed-pins.txt

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

has_nvidia_gpu() {
  local gpus
  gpus="$(nvidia-smi -L 2>/dev/null)" && [[ "$gpus" == *GPU* ]]
}

cuda=false
only_pins=false
for option in "$@"; do
  case "$option" in
  --cuda) cuda=true ;;
  --pins) only_pins=true ;;
  *)
    echo "usage: bash launch/setup.sh [--cuda] [--pins]" >&2
    exit 2
    ;;
  esac
done

with_cuda="$(cat requirements.txt launch/requirements-test.txt)"
pins="$with_cuda"
kind="CUDA 12"
if ! $cuda && ! has_nvidia_gpu; then
  pins="${pins//'jax[cuda12]=='/jax==}"
  kind="CPU"
fi
if $only_pins; then
  printf '%s\n' "$pins"
  exit 0
fi

# Without pip it is one whose making was interrupted.
keep=false
if new_enough "$python" && "$python" -m pip --version >/dev/null 2>&1; then
  keep=true
  # Only a named interpreter is a reason to replace an environment that works.
  if [[ -n "${PYTHON:-}" && "$(version_of "$base")" != "$(version_of "$python")" ]]; then
    keep=false
  fi
fi

if $keep && [[ -f "$stamp" && "$(<"$stamp")" == "$with_cuda" ]]; then
  pins="$with_cuda"
  kind="CUDA 12"
fi
if $keep && [[ -f "$stamp" && "$(<"$stamp")" == "$pins" ]]; then
  echo "setup: .venv already has the pinned packages ($kind)"
  exit 0
fi

if ! $keep; then
  if ! new_enough "$base"; then
    echo "setup: $base is not a Python of version 3.11 or newer; set PYTHON to one" >&2
    exit 1
  fi
  # Colab's Python has no venv of its own, but uv.
  if ! "$base" -m venv --clear .venv 2>/dev/null &&
    ! uv venv --quiet --clear --seed --python "$base" .venv; then
    echo "setup: $base cannot make a virtual environment; install its venv module, or uv" >&2
    exit 1
  fi
fi

# The stamp is there only while the environment is known to match it.
rm -f "$stamp"
"$python" -m pip install -qq --disable-pip-version-check --no-input -r /dev/stdin <<<"$pins"
printf '%s\n' "$pins" >"$stamp"
echo "setup: installed the pinned packages into .venv ($kind, Python $(version_of "$python"))"
