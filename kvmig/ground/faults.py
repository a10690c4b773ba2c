"""What is taken for a fault, and for how long it is borne."""

from __future__ import annotations

import msgspec

from kvmig.ground.errors import ConfigError


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    silent_after_s: float = 1.5
    """An instance that says nothing for so long is silent: its requests run again elsewhere."""
    hung_after_s: float = 60.0
    """An engine whose present step takes longer is hung: the same. After twice that it is
    ended, and started again."""
    instance_wait_s: float = 120.0
    """How long a request whose instance is lost waits for one that it can run on."""
    max_crashes: int = 2
    """A request that saw so many instances crash while it ran there isn't run again."""


def check_faults(faults: FaultConfig, report_ms: float) -> None:
    """Raises ConfigError with the flag, its value and what is allowed.

    report_ms: longest time between two words of a healthy instance.
    """
    rules = (
        (
            faults.silent_after_s > report_ms / 1000,
            "--silent-after",
            faults.silent_after_s,
            f"more seconds than --report-ms ({report_ms:g}) has",
        ),
        (faults.hung_after_s > 0, "--hung-after", faults.hung_after_s, "more than 0"),
        (faults.instance_wait_s >= 0, "--instance-wait", faults.instance_wait_s, "0 or more"),
        (faults.max_crashes >= 1, "--max-crashes", faults.max_crashes, "1 or more"),
    )
    for holds, flag, value, allowed in rules:
        if not holds:
            raise ConfigError(f"{flag} is {value}, must be {allowed}")
