#!/usr/bin/env bash
# Format, lint, types of the scheduling core, then the tests; arguments go to pytest.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

python=.venv/bin/python
"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy optimus_jax/{cost,schedule,fill,plan,judge}
exec "$python" -m pytest -n 2 --dist worksteal "$@"
