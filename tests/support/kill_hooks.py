"""Kills an instance in the middle of a migration, as `kill -9` at that moment would.

A logits processor for vLLM's --logits-processors, which changes no logits: each engine's process
makes one, and has its migrations' sessions look into a file before and after each of their actions.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from kvmig.kvtransfer.destination import DestinationSession
from kvmig.kvtransfer.session import MigrationSession
from kvmig.kvtransfer.source import SourceSession

Perform = Callable[[Any, Any], Coroutine[Any, Any, Any]]
SOURCE = (
    "SourceSession SendReserve before",
    "SourceSession CopyStage before",
    "SourceSession SendTail before",
    "SourceSession ReleaseRequest before",
)
"""Nothing is reserved; there is room; all but the tail is copied; the request is committed."""
DESTINATION = (
    "DestinationSession ReserveBlocks after",
    "DestinationSession ScatterChunk after",
    "DestinationSession RunRequest before",
    "DestinationSession RunRequest after",
)
"""There is room; a stage has come; Commit has come; it is carried out, and nobody knows."""


def flags(file: Path) -> list[str]:
    """vLLM's flags for it. file: which point to kill at, if it is there; then it is removed."""
    config = json.dumps({"kill_at": str(file)})
    return [f"--additional-config={config}", f"--logits-processors={__name__}:KillHooks"]


def kill_at(point: str, file: Path) -> None:
    """Kill the next instance that comes to this point."""
    file.write_text(point)


def was_killed(file: Path) -> bool:
    """Whether one has come to it."""
    return not file.exists()


def assert_killed(file: Path, said: object = "") -> None:
    """One has come to it. said: what to show if not."""
    assert was_killed(file), f"none came to {file.read_text()}: {said}"


class KillHooks(AdapterLogitsProcessor):
    """One of an engine."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, pinned: bool) -> None:
        super().__init__(vllm_config, device, pinned)
        file = Path(vllm_config.additional_config["kill_at"])
        kinds: tuple[type[MigrationSession[Any, Any]], ...] = (SourceSession, DestinationSession)
        for kind in kinds:
            setattr(kind, "_perform", looking(kind.__name__, kind._perform, file))  # noqa: B010

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return None


def looking(session: str, perform: Perform, file: Path) -> Perform:
    """The method, which looks into the file."""

    async def look_and_perform(self: Any, action: Any) -> Any:
        point = f"{session} {type(action).__name__}"
        die_at(f"{point} before", file)
        following = await perform(self, action)
        die_at(f"{point} after", file)
        return following

    return look_and_perform


def die_at(point: str, file: Path) -> None:
    """Unless it is another one that is wanted."""
    if file.exists() and file.read_text() == point:
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
