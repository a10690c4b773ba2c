"""Chooses --load-format by measuring, once for a model (see `kvmig.engines.vllm.load_formats`)."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvmig.core.file_lock import lock_file
from kvmig.core.killed import kill_and_wait
from kvmig.engines.vllm.load_formats import (
    USUAL,
    LoadRecord,
    fastest,
    record_name,
    to_measure,
    weight_files,
)
from kvmig.engines.vllm.load_measure import LoadTime

MEASURE_S = 300.0
"""Timeout of reading a model's weights once, with the start of the process that does it."""
LOCK_S = 900.0
"""Time to wait for another process that measures."""
LOOK_S = 0.5
MEASURE = "kvmig.engines.vllm.load_measure"

log = logging.getLogger(__name__)


def chosen_format(folder: Path, engine: str, gpu: str, device: str) -> LoadRecord:
    """The record of a model, which is made if there is none. One without times is not kept.

    engine: its name with its version. gpu: the id of the GPU to measure on; empty: a CPU. device:
    its name.
    """
    files = weight_files(folder)
    formats, missing = to_measure(device)
    if not files or files[0].suffix != ".safetensors":
        missing |= dict.fromkeys(formats, f"{folder} has no safetensors")
        return unmeasured(folder, device, missing)
    if len(formats) < 2:
        return unmeasured(folder, device, missing)
    path = records_folder(os.environ) / record_name(files, engine, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # two that measure at once would measure each other
        with lock_file(path.with_suffix(".lock"), LOCK_S, LOOK_S):
            if (found := read_record(path)) is not None:
                return found
            begun = path.with_suffix(".begun")
            found = _measured(folder, files, formats, missing, gpu, device, begun)
            if found.seconds:
                _write(path, found)
            begun.unlink(missing_ok=True)
            return found
    except (OSError, TimeoutError) as error:
        return unmeasured(folder, device, missing | dict.fromkeys(formats, repr(error)))


def unmeasured(folder: Path, device: str, why: dict[str, str]) -> LoadRecord:
    """What is used where nothing was measured."""
    return LoadRecord(
        model=str(folder),
        device=device,
        at=time.time(),
        bytes=0,
        seconds={},
        failures=why,
        chosen=USUAL,
    )


def records_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the records."""
    root = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvmig" / "load_formats"


def read_record(path: Path) -> LoadRecord | None:
    """What was measured before; None: nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LoadRecord)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        log.warning("%s is measured again: %s", path, error)
        return None


def _measured(
    folder: Path,
    files: list[Path],
    formats: list[str],
    missing: Mapping[str, str],
    gpu: str,
    device: str,
    begun: Path,
) -> LoadRecord:
    """begun: keeps each time until all are measured: a start whose timeout ends it meanwhile is no
    reason to begin again. Raises OSError."""
    before = read_record(begun)
    seconds: dict[str, float] = {} if before is None else dict(before.seconds)
    failures = dict(missing) if before is None else {**before.failures, **missing}

    def record() -> LoadRecord:
        return LoadRecord(
            model=str(folder),
            device=device,
            at=time.time(),
            bytes=sum(one.stat().st_size for one in files),
            seconds=seconds,
            failures=failures,
            chosen=fastest(seconds),
        )

    for name in formats:
        if name in seconds or name in failures:
            continue
        found = measure_format(folder, name, gpu)
        if found.why:
            failures[name] = found.why
        else:
            seconds[name] = round(found.seconds, 3)
        _write(begun, record())
    return record()


def measure_format(folder: Path, name: str, gpu: str) -> LoadTime:
    """How long one format takes, in a process of its own."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    child = subprocess.Popen(
        [sys.executable, "-m", MEASURE, str(folder), name, "cuda" if gpu else "cpu"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        try:  # `communicate` would end its stdin, and with that the child
            if not select.select([child.stdout], [], [], MEASURE_S)[0]:
                return LoadTime(why=f"it took more than {MEASURE_S:g} s")
            line = child.stdout.readline()
        finally:
            kill_and_wait(child, "the process that measures how a model loads")
    try:
        return msgspec.json.decode(line, type=LoadTime)
    except msgspec.MsgspecError:
        return LoadTime(why=f"its process has ended with code {child.returncode}")


def _write(path: Path, record: LoadRecord) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
    Path(file.name).replace(path)
