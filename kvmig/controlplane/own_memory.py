"""How much of the host's memory an instance takes apart from its KV cache: what a fleet learns from
its first start for the next ones, and for models alike."""

from __future__ import annotations

import os

from kvmig.core.layout import KVLayout
from kvmig.process.descendants import descendants, parents
from kvmig.process.host_use import forget_peaks, peak_bytes, resident_bytes

FIRST_S, LAST_S = 2.0, 60.0
"""Pauses between two looks: each is twice as long as the one before. The first steps of each kind
take most of what is taken; a step that is larger than all before may take more."""


class OwnMemory:
    """The memory of this process and of those that it has started."""

    def __init__(self, layout: KVLayout) -> None:
        self.beside_kv = 0
        """Most bytes that any look has found; 0 before the first."""
        self._layout = layout
        self._forgets = True
        """Whether the peak so far is forgotten with the next look."""

    def forget_peak(self) -> None:
        """Leave out what was taken until now: on a GPU a parked engine's weights were here."""
        self._forgets = True

    def measure(self) -> None:
        """Takes some milliseconds. Raises OSError.

        The first time, what the start has taken for a while is forgotten: weights' files are read
        page by page then, and the system takes such pages back when it needs them.
        """
        processes = descendants([os.getpid()], parents())
        if self._forgets:
            forget_peaks(processes)
            self._forgets = False
        taken = peak_bytes(processes)
        in_cache = sum(resident_bytes(*span) for span in cache_spans(self._layout))
        self.beside_kv = max(self.beside_kv, taken - in_cache)


def cache_spans(layout: KVLayout) -> list[tuple[int, int]]:
    """Find where a KV cache lies in this process's memory: address and bytes, none twice.

    Empty for one on a GPU. Regions may lie between each other.
    """
    if layout.gpu is not None or not layout.num_blocks:
        return []
    found: list[tuple[int, int]] = []
    for one in sorted(layout.regions, key=lambda region: region.base):
        end = one.base + (layout.num_blocks - 1) * one.block_stride + one.run
        if found and one.base <= sum(found[-1]):
            begin, length = found.pop()
            found.append((begin, max(begin + length, end) - begin))
        else:
            found.append((one.base, end - one.base))
    return found
