"""What the launcher is told in confidence: taken out of its environment, so no child inherits it.

Children get it on their stdin (`controlplane.child`): neither flags nor environment have it.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping

from kvmig.ground.discreet import SECRET
from kvmig.ground.errors import ConfigError
from kvmig.kvtransfer.link import LEAST_BYTES


def cluster_secret(environment: MutableMapping[str, str]) -> bytes:
    """The user's, or one for this run. Raises ConfigError if the user's is too short."""
    given = environment.pop(SECRET, "").encode()
    if given and len(given) < LEAST_BYTES:
        raise ConfigError(
            f"{SECRET} has {len(given)} bytes, must have {LEAST_BYTES} or more, or be left out"
        )
    return given or secrets.token_bytes(32)


def taken(environment: MutableMapping[str, str], name: str) -> str:
    """The variable's value; empty if it isn't set."""
    return environment.pop(name, "")
