#!/usr/bin/env bash
# Makes .venv in the repository, installs requirements and the package, unpacks the AppWorld engine.
# A second run skips what is done. PYTHON names the interpreter (3.11 or 3.12); SAGE_EXTRAS adds extras, e.g. "cuda" or "tpu".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3 || true)}
if [ -z "$PYTHON" ] || ! "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'; then
  echo "setup: Python 3.11 or 3.12 is needed (found: ${PYTHON:-none}). Install it, or name it: PYTHON=/path/to/python3.11 bash $0" >&2
  exit 1
fi

want=$(cat requirements.txt pyproject.toml <(echo "${SAGE_EXTRAS:-}") <("$PYTHON" --version) | cksum)
if [ "$(cat .venv/.sage_setup 2>/dev/null || true)" != "$want" ]; then
  started=$SECONDS
  # A .venv without pip is what a failed or interrupted try left.
  .venv/bin/python -m pip --version >/dev/null 2>&1 || { echo "setup: making .venv"; "$PYTHON" -m venv --clear .venv; }
  echo "setup: installing requirements (about a minute)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${SAGE_EXTRAS:+[$SAGE_EXTRAS]}"
  .venv/bin/python -m pip check
  echo "setup: requirements installed in $((SECONDS - started)) s"
  echo "$want" > .venv/.sage_setup
fi

if ! .venv/bin/python - <<'PY'
import pathlib, sys
import importlib.util
root = pathlib.Path(importlib.util.find_spec("appworld").origin).parent
sys.exit(not (root / "apps" / "spotify" / "models.py").is_file())
PY
then
  echo "setup: unpacking the AppWorld engine"
  .venv/bin/appworld install > .venv/appworld_install.log 2>&1 || { cat .venv/appworld_install.log >&2; exit 1; }
fi
