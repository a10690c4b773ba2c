"""How many instances a cluster may have, and when it gets more or fewer."""

from __future__ import annotations

import msgspec

from kvmig.ground.errors import ConfigError


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the mean freeness within [low, high] (Llumnix, section 4.4.3). Times in seconds."""

    low: float = 10.0
    """KV blocks a request: below it for `sustain_s`, instances are added."""
    high: float = 60.0
    """Above it for `sustain_s`, one is drained."""
    min_instances: int = 1
    max_instances: int = 16
    sustain_s: float = 5.0
    cooldown_s: float = 30.0
    """Least time from one instance's end, or start, to the next decision to drain one."""


def check_scaling(config: ScalingConfig, instances: int) -> None:
    """Raises ConfigError with the flag, its value and what is allowed.

    instances: how many there are at the start.
    """
    low, high = config.low, config.high
    least, most = config.min_instances, config.max_instances
    rules: tuple[tuple[bool, str, object, str], ...] = (
        (0 <= low < high, "--autoscale", f"{low:g},{high:g}", "x,y with 0 <= x < y"),
        (least >= 1, "--min-instances", least, "1 or more"),
        (most >= least, "--max-instances", most, f"at least --min-instances ({least})"),
        (
            least <= instances <= most,
            "--instances",
            instances,
            f"from --min-instances ({least}) to --max-instances ({most})",
        ),
        (config.sustain_s >= 0, "--scale-sustain", config.sustain_s, "0 or more"),
        (config.cooldown_s >= 0, "--scale-cooldown", config.cooldown_s, "0 or more"),
    )
    for holds, field, value, allowed in rules:
        if not holds:
            raise ConfigError(f"{field} is {value}, must be {allowed}")
