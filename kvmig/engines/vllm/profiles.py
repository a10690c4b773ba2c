"""Step times that were measured before: one small file for each model, device and shape."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from vllm import __version__
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from kvmig.engines.base import StepTime

log = logging.getLogger(__name__)


def profile_path(config: VllmConfig, capacity: int) -> Path:
    """Where the step times of such an engine are kept; `capacity`: of its KV cache, in tokens.

    In the user's cache folder (XDG_CACHE_HOME). A file that is removed is measured anew.
    """
    what = (
        __version__,
        config.compute_hash(),
        str(Path(config.model_config.model).resolve()),
        current_platform.get_device_name(),
        torch.get_num_threads(),
        config.scheduler_config.max_num_seqs,
        config.model_config.max_model_len,
        capacity,
    )
    digest = hashlib.blake2b(msgspec.json.encode(what), digest_size=8).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvmig" / "step_times" / f"{digest}.json"


def read(path: Path) -> list[StepTime]:
    """What is there; empty if there is nothing, or nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[StepTime])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("step times are measured anew: %s: %s", path, error)
        return []


def write(path: Path, times: Sequence[StepTime]) -> None:
    """Keep them for the next start; a folder that can't be written to only costs that."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(times))
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("step times can't be kept: %s: %s", path, error)
