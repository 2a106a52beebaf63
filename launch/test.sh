#!/usr/bin/env bash
# Sets up, then runs the tests. Tiers:
#   bash launch/test.sh            default: no network, no accelerator, under 10 minutes on two cores
#   bash launch/test.sh --ci       default, then slow, then parity with torch (what .ci/run calls)
#   bash launch/test.sh --soak     kill series and long comparisons
#   bash launch/test.sh --parity   comparisons with torch only (installs torch into .venv)
# Further arguments go to pytest. SAGE_TEST_PROCESSES (2) is the number of test processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tier=default
case "${1:-}" in --ci | --soak | --parity) tier=${1#--}; shift ;; esac
bash launch/setup.sh
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}

torch() { .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"; }
# Two processes, each file in one of them; a soak has the machine for itself.
run() { .venv/bin/python -m pytest --durations=10 -n "${SAGE_TEST_PROCESSES:-2}" --dist loadfile "$@"; }

case $tier in
  default) run "$@" ;;
  soak) SAGE_TEST_PROCESSES=0 run -m soak "$@" ;;
  parity) torch; run -m parity "$@" ;;
  ci)
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "ruff>=0.6"
    .venv/bin/ruff check .
    torch
    # For the test of the Ray pool, which is skipped without it.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[ray]" || echo "test: Ray could not be installed; its test is skipped"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[qwen]" || echo "test: Qwen's vocabulary could not be installed; its tests are skipped"
    # Default and slow together: what a file's tests share (a built world, compiled kernels) is made once.
    run -m "not soak" "$@"
    ;;
esac
