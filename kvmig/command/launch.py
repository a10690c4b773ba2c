"""The start document of a deployment that runs a command: one JSON word. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

HEALTH = "/health"
"""Path that most servers answer once they are ready."""
HANG_S = 120.0
"""Time without a sign of life until a server counts as hung."""


class CommandLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document. Times in seconds."""

    model: str
    """The name that records and rows have."""
    command: tuple[str, ...]
    """The template."""
    source: str
    """What `{model}` becomes."""
    uds: str
    """Path of the Unix socket that the deployment listens on."""
    spool: str
    """Folder of usage records."""
    quotas: str
    """Path of the socket that grants tokens."""
    instances: int = 1
    most: int = 1
    """Instances at most, however many are ordered."""
    health: str = HEALTH
    """Path that answers 200 once the server is ready."""
    memory: int = 0
    gpu_memory: int = 0
    gpus: Mapping[str, tuple[str, ...]] = {}
    """GPUs of the first instances, by name."""
    parallel: int = 0
    """Calls that a server works for at once, at most; 0: as many as come."""
    pass_environment: tuple[str, ...] = ()
    """Variables of the environment that servers get beyond the usual ones."""
    stream_usage: bool = True
    """Whether the server takes `stream_options.include_usage`."""
    start_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0
    hang_timeout_s: float = HANG_S
    """Time without an answer to `health`, or a part of another answer, until it counts as hung."""


def encode_launch(launch: CommandLaunch) -> str:
    """The word."""
    return msgspec.json.encode(launch).decode()


def decode_launch(word: str) -> CommandLaunch:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(word, type=CommandLaunch)
