"""Engines that have no room left: all that they have is reserved, for requests that never come."""

from __future__ import annotations

from kvmig.core.errors import MigrationRefused
from kvmig.testing.suite import ConformanceSuite

SIZES = (16.5, 3.5, 0.5)
"""Sizes in blocks of the requests that fill an engine, as many of each as fit."""


async def fill(suite: ConformanceSuite, first: str, *others: str) -> list[str]:
    """Reserve at these engines until no request of half a block finds room; for whom.

    Engine "a" makes the requests: it must come last.
    """
    a, exports = suite.engines["a"], []
    for blocks in SIZES:
        refused = False
        while not refused:
            hog = await suite.begin(suite.prompt(suite.blocks(blocks)), suite.blocks(10), 1)
            export = await a.export(hog)
            a.abort([hog])
            try:
                await suite.engines[first].reserve(export)
                exports.append(export)
            except MigrationRefused:
                refused = True
    for name in others:
        for export in exports:
            await suite.engines[name].reserve(export)
    return [export.request_id for export in exports]


async def empty(suite: ConformanceSuite, name: str, hogs: list[str]) -> None:
    """Give all of the memory back."""
    for hog in hogs:
        await suite.engines[name].cancel(hog)
