#!/usr/bin/env bash
# Unpacks the kit's pieces, which lie beside this file, into the folder that is named (default: kvmig-kit),
# and writes activate.sh there: what a shell has to read before `bench/gpu.sh`. PYTHON: with torch
# and of the kit's minor version (default: python3); NVIDIA's libraries are taken from its torch.
set -euo pipefail
from=$(cd "$(dirname "$0")" && pwd)
where=${1:-kvmig-kit}
python=${PYTHON:-python3}
mkdir -p "$where"
where=$(cd "$where" && pwd)
(cd "$from" && sha256sum --quiet --check SHA256SUMS)
cat "$from"/kit.[0-9]* | xz --decompress --stdout -T0 | tar --extract --directory "$where"
# The libraries of CUDA that are here already, beside the NCCL that came along.
torch=$("$python" -c 'import importlib.util as u, pathlib; s = u.find_spec("torch"); print(pathlib.Path(s.origin).parent.parent if s else "")')
if [ -n "$torch" ] && [ -d "$torch/nvidia" ] && [ ! "$torch" -ef "$where/site" ]; then
  mkdir -p "$where/site/nvidia"
  for one in "$torch"/nvidia/*/; do
    name=$(basename "$one")
    [ -e "$where/site/nvidia/$name" ] || ln -s "${one%/}" "$where/site/nvidia/$name"
  done
fi
"$python" -m compileall -q -j 0 "$where/site" > /dev/null || true # files for other versions of Python are no error
cat > "$where/activate.sh" << END
export PYTHONPATH=$where/site:$where/kvmig PYTHON=$python
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
END
echo "unpacked; . $where/activate.sh, then bench/gpu.sh in $where/kvmig"
