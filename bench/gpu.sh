#!/usr/bin/env bash
# Everything a GPU adds, in one run of under eleven minutes, with one JSON file a part in $OUT
# (default: bench/results); where vLLM is installed more minutes, of whole servers (`--only serving`).
# `--set a`, then b to h: parts of at most nine minutes together, the most worth first (docs/gpu.md).
# Needs Python with torch; CuPy, Triton and nvcc are used where they are; neither the network, nor an
# installed kvmig. Arguments go to `python -m bench.gpu`.
# WHEELS: a folder with what the last part wants and the machine lacks (see bench/README.md).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if [ -n "${WHEELS:-}" ]; then
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --target "$packages" "$WHEELS"/*.whl
  export PYTHONPATH=$PYTHONPATH:$packages
fi
"${PYTHON:-python3}" -m bench.gpu --out "${OUT:-bench/results}" "$@"
