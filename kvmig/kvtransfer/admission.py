"""How many migrations may go one way at once, and of how many bytes: pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import MigrationRefused
from kvmig.ground.layout import KVLayout


def kv_bytes(num_tokens: int, layout: KVLayout) -> int:
    """Bytes of KV cache that a request of so many tokens holds.

    Example: 33 tokens in blocks of 16 tokens and 1000 bytes are 3000 bytes.
    """
    return -(-num_tokens // layout.block_tokens) * layout.block_bytes


def admit(config: MigrationConfig, way: str, under_way: Sequence[int], nbytes: int) -> None:
    """Let one more migration of `nbytes` begin beside those `under_way`, of so many bytes each.

    way: "in" or "out". One that is over `max_migration_bytes` by itself goes alone.
    Raises MigrationRefused ("busy") that says which limit is reached.
    """
    if len(under_way) >= config.max_migrations:
        raise MigrationRefused(
            "busy",
            f"{len(under_way)} migrations {way}, --max-migrations is {config.max_migrations}",
        )
    most, total = config.max_migration_bytes, sum(under_way) + nbytes
    if most and under_way and total > most:
        raise MigrationRefused(
            "busy", f"{total} bytes would migrate {way}, --max-migration-bytes is {most}"
        )
