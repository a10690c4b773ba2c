"""What surrounds a policy: how fresh its knowledge is, and what llumlets do about its word."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmig.controlplane.policy import POLICIES, Policy
from kvmig.core.errors import ConfigError


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One system around the policies."""

    name: str
    reports: Literal["live", "fresh", "step"]
    """live: every `report_s` or when counts change, as llumlets do, with what was dispatched
    since counted as pending; fresh: up to date at every look; step: as of the engine's last
    step boundary."""
    report_s: float = 0.05
    round_s: float = 0.2
    front_end_s: float = 0.0
    """What a request spends before its dispatch."""
    max_migrations: int = 4
    """At once into an instance."""
    max_stages: int = 8
    refuse_when_queued: bool = False
    """Whether a destination where requests wait takes none in."""


SETTINGS = {
    one.name: one
    for one in (
        Setting(name="live", reports="live"),
        Setting(name="text", reports="fresh"),
        Setting(name="artifact", reports="step", front_end_s=0.1, refuse_when_queued=True),
    )
}
"""live: kvmig as it runs. text and artifact: Llumnix (OSDI'24) by its paper, by its artifact."""

ALIASES = {"infaas++": "least-loaded"}
"""Other names of policies, from the paper."""
NAMES = (*POLICIES, *ALIASES)


def policy(name: str) -> Policy:
    """By name. Raises ConfigError with the names there are."""
    if name not in NAMES:
        raise ConfigError(f"--policy is {name}, must be {' or '.join(NAMES)}")
    return {str(key): value for key, value in POLICIES.items()}[ALIASES.get(name, name)]


def setting(name: str) -> Setting:
    """By name. Raises ConfigError with the names there are."""
    if name not in SETTINGS:
        raise ConfigError(f"--setting is {name}, must be {' or '.join(SETTINGS)}")
    return SETTINGS[name]
