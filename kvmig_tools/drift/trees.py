"""Trees of an engine's sources: a folder, what is installed, or a version from the registry."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvmig.core.errors import ConfigError
from kvmig_tools.drift.source import Tree

VERSION = re.compile(r"\d+(\.\d+)+\w*")
TIMEOUT_S = 900.0
ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "kvmig" / "trees"


def tree(name: str, package: str, distributions: Sequence[str], cache: Path = CACHE) -> Tree:
    """The tree of a version or folder; "installed" for the one beside this Python.

    Raises ConfigError if there is none.
    """
    if name == "installed":
        if (beside := _installed(package, distributions)) is None:
            raise ConfigError(f"{package} is not installed: name a version or a folder")
        return beside
    if Path(name).is_dir():
        return _of_folder(Path(name), package)
    if not VERSION.fullmatch(name):
        raise ConfigError(f"{name} must be a version like 0.32.0, or a folder with {package}/")
    beside = _installed(package, distributions)
    if beside is not None and beside.version == name:
        return beside
    folder = ROOT / f".{package}" / name  # see `scripts/setup_env.py --vllm`
    if not (folder / package).is_dir():
        folder = cache / f"{package}-{name}"
    if not (folder / package).is_dir():
        _download(name, distributions, folder)
    return Tree(folder, package, name)


def newest(distributions: Sequence[str]) -> str:
    """The newest version that the registry has. Raises ConfigError if it can't be asked."""
    versions = []
    for name in distributions:
        done = _pip("index", "versions", name)
        found = VERSION.search(done.stdout.partition("(")[2])
        if done.returncode or found is None:
            raise ConfigError(f"the registry doesn't tell of {name}: {_why(done)}")
        versions.append(found.group())
    return max(versions, key=numbers)


def numbers(version: str) -> tuple[int, ...]:
    """0.32.0 as (0, 32, 0); what follows the numbers doesn't count."""
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def _installed(package: str, distributions: Sequence[str]) -> Tree | None:
    spec = importlib.util.find_spec(package)  # of a top package: finds it, and imports nothing
    if spec is None or spec.origin is None:
        return None
    for name in distributions:
        try:
            return Tree(Path(spec.origin).parents[1], package, version(name))
        except PackageNotFoundError:
            continue
    return Tree(Path(spec.origin).parents[1], package)


def _of_folder(folder: Path, package: str) -> Tree:
    if not (folder / package).is_dir():
        raise ConfigError(f"{folder} has no folder {package}")
    names = sorted(folder.glob("*.dist-info"))
    versions = [found for one in names if (found := VERSION.search(one.name))]
    return Tree(folder, package, versions[0].group() if versions else "")


def _download(name: str, distributions: Sequence[str], folder: Path) -> None:
    """Fetch a wheel and keep its Python; the first distribution that has the version."""
    why = ""
    for distribution in distributions:
        with tempfile.TemporaryDirectory() as place:
            done = _pip("download", "--no-deps", "-q", f"{distribution}=={name}", "-d", place)
            wheels = list(Path(place).glob("*.whl"))
            if done.returncode or not wheels:
                why = _why(done)
                continue
            with zipfile.ZipFile(wheels[0]) as wheel:
                wanted = [one for one in wheel.namelist() if one.endswith((".py", "METADATA"))]
                wheel.extractall(folder, wanted)
            return
    raise ConfigError(f"no {' or '.join(distributions)} {name} in the registry: {why}")


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _why(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (lines or done.stderr.splitlines() or ["no output"])[-1]
