"""What nvcc made of the kernels: machine code, registers and shared memory, by CUDA's own tools."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

Code = dict[tuple[str, str], str]
"""Machine code by target and kernel."""


def cuobjdump() -> str:
    """That of CUDA's toolkit, or of Triton's wheel; both find nvdisasm beside themselves."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    spec = importlib.util.find_spec("triton")
    if spec and spec.origin:
        folders.append(str(Path(spec.origin).parent / "backends" / "nvidia" / "bin"))
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if not found or not shutil.which("nvdisasm", path=str(Path(found).parent)):
        pytest.skip("neither CUDA's toolkit here nor Triton has cuobjdump and nvdisasm")
    return found


def output(*command: str, path: str = "") -> str:
    env = os.environ | {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def code_of(library: Path) -> Code:
    """Of all kernels of a library."""
    tool = cuobjdump()
    found: Code = {}
    target = ""
    dump = output(tool, "-sass", str(library), path=str(Path(tool).parent))
    for part in re.split(r"(?m)^(?=arch = |\s*Function : )", dump):
        if part.startswith("arch = "):
            target = part.split()[2]
        elif part.strip().startswith("Function : "):
            found[target, part.split()[2]] = part
    return found


def registers_of(library: Path) -> dict[str, tuple[int, int]]:
    """The most registers of a thread, and bytes of static shared memory, by kernel; of all
    targets."""
    found: dict[str, tuple[int, int]] = {}
    used = output(cuobjdump(), "--dump-resource-usage", str(library))
    for name, *numbers in re.findall(r"Function (\w+):\s+REG:(\d+) .*?SHARED:(\d+)", used):
        registers, shared = map(int, numbers)
        before = found.get(name, (0, 0))
        found[name] = max(registers, before[0]), max(shared, before[1])
    return found
