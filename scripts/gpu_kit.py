"""Packs kvmig, vLLM's CUDA build for one kind of GPU and what they need into pieces, for a machine
that has a GPU and Python with torch but no network, and takes small files only.

`python -m scripts.gpu_kit FOLDER` writes FOLDER/kit.NN and FOLDER/unpack.sh; there
`bash unpack.sh WHERE` unpacks them, and `bench/gpu.sh` in WHERE/kvmig runs (docs/gpu.md). The
packages come from the environment that `scripts/setup_env.py --cuda-wheels` makes; Python must be
of the same minor version on both machines. NVIDIA's libraries are those of the torch over there.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.fatbins import MAGIC, prune_file
from scripts.setup_env import CUDA_WHEELS, ROOT, Setup, SetupError

PIECE_BYTES = 58_000_000
ARCHITECTURE = 90
UNPACK = Path(__file__).with_name("gpu_kit_unpack.sh")
SMALL_BYTES = 1 << 20
"""Smaller libraries are packed as they are."""
STRIPPED = frozenset(("libtriton.so", "libtorch_cpu.so", "libtorch_python.so"))
"""Libraries that strip doesn't break: it does those that were patched for their wheel."""
PACKAGES_LEFT = (
    "nvidia/*", "nvidia_*", "tokenspeed*", "tilelang*", "flashinfer*", "cuda", "cuda_*",
    "humming*",
    "quack*", "llvmlite*", "numba*", "opencv*", "cv2", "PyNvVideoCodec*",
    "pynvvideocodec*", "cudnn",
    "z3*", "instanttensor*", "torchaudio*", "torchcodec*", "fastsafetensors*", "nccl", "nccl4py*",
    "pip*", "grpcio*", "grpc", "sentry_sdk*", "supervisor*",
    "ninja*", "bin", "libkineto*",
)  # fmt: skip
"""Packages that vLLM starts without."""
PACKAGES_KEPT = ("nvidia/nccl", "nvidia_nccl*", "nvidia_ml_py*")
FILES_LEFT = (
    "torch/include", "torch/share", "torch/test", "torch/bin/protoc*", "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C*", "triton/backends/nvidia/bin/ptxas-blackwell",
    "triton/backends/nvidia/bin/nvdisasm", "triton/backends/nvidia/lib/cupti/*.a",
    "triton/_C/libproton*", "nvidia/nccl/include",
)  # fmt: skip
"""Parts of packages that a server doesn't use: sources, compilers for other GPUs, tools."""


class KitError(Exception):
    """The kit can't be packed; the message is one sentence."""


def stage_packages(packages: Path, site: Path) -> None:
    """Copy an environment's packages, but for what the kit leaves. Raises OSError."""
    left = matches(packages, PACKAGES_LEFT) - matches(packages, PACKAGES_KEPT)
    left |= matches(packages, FILES_LEFT)

    def ignored(folder: str, names: Sequence[str]) -> list[str]:
        return [one for one in names if one == "__pycache__" or Path(folder, one) in left]

    shutil.copytree(packages, site, symlinks=True, ignore=ignored)


def matches(packages: Path, patterns: Iterable[str]) -> set[Path]:
    """All that patterns name there."""
    return {path for pattern in patterns for path in packages.glob(pattern)}


def shrink_libraries(site: Path, architecture: int) -> None:
    """Take other GPUs' machine code and symbols out of large libraries. Raises KitError."""
    for path in sorted(site.rglob("*.so*")):
        if path.is_symlink() or not path.is_file() or path.stat().st_size < SMALL_BYTES:
            continue
        if MAGIC in path.read_bytes():
            summary = prune_file(path, architecture)
            print(f"  {path.name}: {summary.zeroed >> 20} MiB of other GPUs' code left out")
            continue  # strip may move what a registration reads by its offset
        if path.name in STRIPPED:
            run(["strip", "--strip-unneeded", str(path)], f"symbols of {path.name}")


def stage_project(root: Path, project: Path) -> None:
    """Copy what git knows of the repository, and the kernels that are built in it.

    Raises KitError.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        raise KitError(f"{root} must be a git repository: {listed.stderr.strip()}")
    names = [Path(one) for one in listed.stdout.split("\0") if one]
    names += [path.relative_to(root) for path in (root / "kvmig" / "kernels" / "_lib").glob("*.so")]
    for name in names:
        if (root / name).exists() or (root / name).is_symlink():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, project / name, follow_symlinks=False)


def pack(folder: Path, out: Path, piece_bytes: int, level: int = 6) -> list[Path]:
    """Compress a folder's contents into pieces, with what unpacks them; the pieces.

    Raises KitError, OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("kit.*"):
        old.unlink()
    whole = out / "kit.tar.xz"
    run(
        ["tar", "--create", "--sort=name", "--use-compress-program", f"xz -T0 -{level}",
         "--file", str(whole), "--directory", str(folder), "."],
        "the archive",
    )  # fmt: skip
    pieces: list[Path] = []
    with whole.open("rb") as file:
        while data := file.read(piece_bytes):
            pieces.append(out / f"kit.{len(pieces):02}")
            pieces[-1].write_bytes(data)
    whole.unlink()
    sums = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in pieces]
    (out / "SHA256SUMS").write_text("".join(sums))
    shutil.copy2(UNPACK, out / "unpack.sh")
    return pieces


def run(command: list[str], what: str) -> None:
    """Raises KitError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise KitError(f"{what}: {command[0]} failed: {last}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="FOLDER", help="where the pieces go")
    parser.add_argument("--architecture", type=int, default=ARCHITECTURE, help="90 is an H100's")
    parser.add_argument("--piece-bytes", type=int, default=PIECE_BYTES)
    parser.add_argument("--level", type=int, choices=range(10), default=6, help="of xz")
    options = parser.parse_args(arguments)
    try:
        Setup(CUDA_WHEELS, "cuda").install_cuda_wheels()
        (packages,) = CUDA_WHEELS.glob("lib/python*/site-packages")
        with tempfile.TemporaryDirectory(prefix="kvmig-kit-") as place:
            kit = Path(place)
            stage_packages(packages, kit / "site")
            shrink_libraries(kit / "site", options.architecture)
            stage_project(ROOT, kit / "kvmig")
            pieces = pack(kit, options.out, options.piece_bytes, options.level)
    except (KitError, SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    whole = sum(one.stat().st_size for one in pieces)
    print(f"{len(pieces)} pieces, {whole / 1e6:.0f} MB, and unpack.sh in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
