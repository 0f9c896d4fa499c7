#!/usr/bin/env bash
# From a fresh clone to a trained model and its report; arguments go to train and evaluate.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

.venv/bin/python -m optimus_jax.train --config=configs/digits.py "$@"
.venv/bin/python -m optimus_jax.evaluate --config=configs/digits.py "$@"
