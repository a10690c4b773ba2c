#!/usr/bin/env bash
# Everything a GPU adds, in one run of under nine minutes, with one JSON file a part in $OUT
# (default: bench/results). Needs Python with torch; CuPy, Triton and nvcc are used where they are;
# neither vLLM, nor the network, nor an installed kvmig. Arguments go to `python -m bench.gpu`.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m bench.gpu --out "${OUT:-bench/results}" "$@"
