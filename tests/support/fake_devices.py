"""A machine's GPUs as NVML has them, of the tests' own: how much memory there is, and who has it.

One folder is the machine, for all processes that have it in $KVMIG_FAKE_NVML, and `MODULES` in
their path before nvidia-ml-py. `machine.json` is what there is; a process's memory is a file
`PID UUID` with a number of bytes, which counts as long as that process is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = "KVMIG_FAKE_NVML"
MODULES = Path(__file__).parent / "fake_nvml"
"""Where the module `pynvml` is that reads such a folder."""
GIB = 1 << 30
STEPS = "steps"
"""File of the folder with the begin and end of each step of an engine: `UUID PID BEGIN END`."""


@dataclass
class FakeProcess:
    """Of somebody else; it is always there."""

    pid: int
    used: int | None
    drawing: bool = False
    mps: bool = False


@dataclass
class FakePart:
    """A part of a GPU that is split (MIG)."""

    uuid: str
    total: int
    processes: list[FakeProcess] = field(default_factory=list)


@dataclass
class FakeDevice:
    """One GPU."""

    uuid: str
    total: int = 80 * GIB
    reserved: int = 0
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    processes: list[FakeProcess] = field(default_factory=list)
    parts: list[FakePart] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    nvlinks: list[str] = field(default_factory=list)
    busy: int | None = 35
    """Percent of the last moments in which it computed; None: it doesn't know, as a part of one."""
    milliwatts: int | None = 301_500
    lost: bool = False
    old: bool = False
    """Whether its driver knows the first versions of calls only."""


def devices(number: int, total: int = 80 * GIB) -> list[FakeDevice]:
    """So many that reach each other over NVLink."""
    uuids = [f"GPU-{at:08x}-kvmig" for at in range(number)]
    return [
        FakeDevice(
            uuid,
            total,
            peers=[other for other in uuids if other != uuid],
            nvlinks=[other for other in uuids if other != uuid],
        )
        for uuid in uuids
    ]


class FakeMachine:
    """The folder, as a test or an engine on such a GPU has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, machine: Sequence[FakeDevice]) -> None:
        """These are its GPUs from now on."""
        _write(self.folder / "machine.json", json.dumps([asdict(one) for one in machine]))

    @property
    def environment(self) -> dict[str, str]:
        """Of processes that are to see them."""
        path = os.pathsep.join([str(MODULES), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {FOLDER: str(self.folder), "PYTHONPATH": path}

    def devices(self) -> list[dict[str, object]]:
        """What there is."""
        found: list[dict[str, object]] = json.loads((self.folder / "machine.json").read_text())
        return found

    @contextmanager
    def answering_nonsense(self) -> Iterator[None]:
        """Within the block its driver fails in a way that NVML knows no error for."""
        file = self.folder / "machine.json"
        before = file.read_text()
        _write(file, "nonsense")
        try:
            yield
        finally:
            _write(file, before)

    def take(self, uuid: str, nbytes: int, pid: int | None = None) -> None:
        """A process (None: this one) has so many bytes of it from now on; 0: none."""
        _write(self.folder / f"{os.getpid() if pid is None else pid} {uuid}", str(nbytes))

    def taken(self, pid: int) -> int:
        """Bytes that a process has of all of them."""
        return sum(int(file.read_text()) for file in self.folder.glob(f"{pid} *"))


def _write(file: Path, text: str) -> None:
    """At once, as others read it at any time."""
    begun = file.with_name(f".{file.name} {os.getpid()}")
    begun.write_text(text)
    begun.replace(file)
