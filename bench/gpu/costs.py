"""A model's step times on shares of this GPU's SMs, and the costs that `kvmig.placement` computes
with, fitted to them (`python -m kvmig_tools.profile --shares`).

A Qwen3-0.6B with random weights, under an MPS daemon of our own. The costs are written into the
result's folder, as gpu_costs.toml. Without `nvidia-cuda-mps-control`, or without SciPy, it is
skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from bench.gpu.device import note_gpu, options_of
from bench.gpu.serving import missing, skipped
from bench.gpu.sharing import MPS_CONTROL, mps
from bench.report import begin, finish, say
from kvmig.core.errors import KvmigError

ON_GPU = ("--max-num-seqs=64", "--num-gpu-blocks-override=3000", "--max-model-len=8192")
ON_CPU = ("--max-num-seqs=2", "--enforce-eager", "--dtype=float32", "--repeats=1")
TARGETS = {"prefill_error_median": {"max": 7.0}, "decode_error_median": {"max": 7.0}}
"""Percent: as the fit of the A100 that comes with kvmig."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 if it failed."""
    options = options_of(__doc__, arguments)
    on_gpu = options.device == "cuda"
    shares = "100,60,30" if on_gpu else "100,50"
    model = "qwen3-0.6b" if on_gpu else "count"
    result = begin("gpu costs", {"device": options.device, "model": model, "shares": shares})
    note_gpu(result)
    if reason := missing():
        return skipped(result, options, reason)
    if find_spec("scipy") is None:
        return skipped(result, options, "SciPy is not installed")
    if on_gpu and shutil.which(MPS_CONTROL) is None:
        return skipped(result, options, f"{MPS_CONTROL} is not installed")
    from bench.models import model_folder
    from kvmig_tools.cost_file import to_toml
    from kvmig_tools.profile import engine_flags, parser
    from kvmig_tools.share_profile import profile_shares

    file = (options.out or Path("gpu_costs.json")).with_suffix(".toml")
    given, more = parser().parse_known_args(
        [
            str(model_folder(model)), f"--out={file}", f"--shares={shares}", f"--name={model}",
            "--instances=1", *(ON_GPU if on_gpu else ON_CPU),
        ]
    )  # fmt: skip
    failed = False
    try:
        with mps(on_gpu) as environment, patch.dict(os.environ, environment):
            device = profile_shares(given, engine_flags(given, more))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_toml(device), encoding="utf-8")
        errors = device.models[model].tp["1"].errors
        result.targets = dict(TARGETS)
        for part, (middle, high) in (("prefill", errors.prefill), ("decode", errors.decode)):
            result.summary |= {f"{part}_error_median": middle, f"{part}_error_p90": high}
    except (KvmigError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        failed = True
        result.samples.append({"failed": f"{type(error).__name__}: {error}"})
        say(str(error))
    return finish(result, options) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
