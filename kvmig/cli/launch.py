"""What the launcher tells a llumlet, and what any child answers (see `controlplane.child`)."""

from __future__ import annotations

import msgspec

from kvmig.ground.config import ClusterConfig
from kvmig.ground.discreet import Discreet


class LlumletLaunch(Discreet, frozen=True, kw_only=True):
    """Everything that a llumlet must know to start (JSON; the secret in base64)."""

    cluster: str
    """Names this cluster's shared memory."""
    instance: str
    secret: bytes
    config: ClusterConfig
    engine_argv: list[str]
    """MODEL and the engine's flags."""


class Announcement(msgspec.Struct, frozen=True):
    """A child's one answer: its endpoint, or the sentence that says why it can't start."""

    endpoint: str = ""
    failed: str = ""
