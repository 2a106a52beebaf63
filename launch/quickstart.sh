#!/usr/bin/env bash
# From a clone to a report: sets up, builds the mini world, evaluates the start policy, runs SAGE, evaluates again.
#   bash launch/quickstart.sh                  the first steps of the demo, from the policy kept in the repository
#   bash launch/quickstart.sh --smoke          a few minutes: 12 scenarios, 3 steps
#   bash launch/quickstart.sh --from_scratch   collects demonstrations and does the SFT too, live (an hour more; with --smoke a few minutes)
#   bash launch/quickstart.sh --workdir=DIR    where everything is written (default runs/quickstart, runs/smoke, runs/scratch in the repository)
# The same command resumes a run that was stopped. Further arguments go to sage_jax.train.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
arg="" workdir=runs/quickstart rest=() smoke="" scratch=""
for a in "$@"; do
  case $a in
    --smoke) smoke=smoke workdir=runs/smoke ;;
    --from_scratch) scratch=from_scratch workdir=runs/scratch ;;
    --workdir=*) given=${a#--workdir=} ;;
    *) rest+=("$a") ;;
  esac
done
if [ -n "$smoke" ] && [ -n "$scratch" ]; then
  arg=":from_scratch,smoke" workdir=runs/scratch_smoke
elif [ -n "$smoke$scratch" ]; then
  arg=":$smoke$scratch"
fi
case ${given:-} in
  "") ;;
  /* | "~"*) workdir=$given ;;
  *) workdir=$here/$given ;;  # as the caller sees it
esac
started=$SECONDS
bash launch/setup.sh
if ! .venv/bin/python -c 'import sys; from sage_jax.world.isolation import landlock_version; sys.exit(landlock_version() < 1)'; then
  echo "quickstart: this kernel has no Landlock, so model-written code could read your files; going on with --config.world.allow_unisolated=True"
  rest+=(--config.world.allow_unisolated=True)
fi
.venv/bin/python -m sage_jax.train --config="configs/quickstart.py$arg" --workdir="$workdir" "${rest[@]}"
echo "quickstart: $((SECONDS - started)) s in all"
