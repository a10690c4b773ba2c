"""`python -m kvmig.engines.vllm.load_measure FOLDER FORMAT DEVICE`: reads a model's weights once.

It reads them as vLLM does with this --load-format, and prints how long it took, or why it fails.

It is a process of its own, because a loader may end it. It ends with its stdin.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec

from kvmig.core.clock import monotonic
from kvmig.engines.kind import set_offline
from kvmig.engines.vllm.load_formats import weight_files


class LoadTime(msgspec.Struct, frozen=True):
    """One line on stdout."""

    seconds: float = 0.0
    why: str = ""
    """Why there is no time; empty: there is one."""


def evict(files: Sequence[Path]) -> None:
    """Ask the system to forget what it has of the files: a start from the disk is measured."""
    for one in files:
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_weights(folder: Path, load_format: str, device: str) -> float:
    """Read all weights and copy them to the device, as a model's parameters get them; seconds."""
    import torch
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(LoadConfig(load_format=load_format, use_tqdm_on_load=False))
    model = SimpleNamespace(model=str(folder), model_weights="", revision=None)
    evict(weight_files(folder))
    begun = monotonic()
    for _, tensor in loader.get_all_weights(model, torch.nn.Module()):
        tensor.to(device, copy=True)
    if device != "cpu":
        torch.cuda.synchronize()
    return monotonic() - begun


def end_with_stdin() -> None:
    """Wait for the end of stdin: the result isn't wanted any more."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main(words: Sequence[str]) -> int:
    """Exit code 0 after a line with the time. Raises what the loader does, after a line, too."""
    folder, load_format, device = words
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no report
    set_offline()
    threading.Thread(target=end_with_stdin, daemon=True, name="stdin").start()
    with reports:
        try:
            found = LoadTime(read_weights(Path(folder), load_format, device))
        except Exception as error:  # whatever a loader says
            why = f"{' '.join(str(error).split())[:300]} ({type(error).__name__})"
            reports.write(msgspec.json.encode(LoadTime(why=why)) + b"\n")
            raise
        reports.write(msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
