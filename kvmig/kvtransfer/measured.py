"""Running averages of what one instance's migrations have measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvmig.core.layout import KVLayout
from kvmig.kvtransfer.report import MigrationReport

WEIGHT = 0.25
"""Weight of a new measurement in an average of times."""
RATE_WEIGHT = 0.3
"""Weight of a new measurement in the average rate of whole migrations."""
FIRST_LEAD_MS = 2.0
FIRST_PAUSE_MS, FIRST_PAUSE_STEPS = 2.0, 1.0
"""The first pause is expected to be the longer of both. On an H100 the first move each way, before
which 2 ms were expected, had a gap of 2.3 and 2.5 steps, those after it 1.4 (26 November 2026)."""
DEVIATIONS = 2.0
"""How many average deviations a pause is expected to be longer than the average."""


CHUNK_BYTES, CHUNK_BYTES_ON_GPU = 1 << 20, 32 << 20
"""Default sizes of chunks. Each chunk costs half a millisecond of messages and threads,
in which a GPU's link brings 25 MB."""


def slot_bytes(chunk_bytes: int | None, layout: KVLayout) -> int:
    """Bytes of a staging slot: of one chunk, or of one block of a model whose blocks are larger.

    chunk_bytes: None: as much as suits the memory that the KV cache is in.
    """
    usual = CHUNK_BYTES if layout.gpu is None else CHUNK_BYTES_ON_GPU
    return max(usual if chunk_bytes is None else chunk_bytes, layout.block_bytes)


class ChunkSizer:
    """Sizes the next copy by the rate of earlier ones, so that none lasts longer than `chunk_ms`.

    block_bytes: bytes of one fused block; slot: bytes of a staging slot.
    """

    def __init__(self, block_bytes: int, slot: int, chunk_ms: float) -> None:
        self._block_bytes = block_bytes
        # An engine whose requests don't move may have no blocks to speak of.
        self._most = slot // max(block_bytes, 1)
        self._chunk_ms = chunk_ms
        self.bytes_per_ms: float | None = None
        """Rate of copies; None until one was measured."""

    def blocks(self) -> int:
        """Blocks of the next chunk: 1 until a copy was measured, never less, never over a slot."""
        if self.bytes_per_ms is None:
            return 1
        in_time = self.bytes_per_ms * self._chunk_ms / self._block_bytes
        return int(max(1, min(self._most, in_time)))

    def observe(self, nbytes: int, ms: float) -> None:
        """Record a copy of `nbytes` that took `ms`; one that took no time is left out."""
        if nbytes > 0 and ms > 0:
            self.bytes_per_ms = _average(self.bytes_per_ms, nbytes / ms)

    def cut(self, block_ids: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Chunks of `block_ids` as (position of the first, ids), each sized when asked for."""
        first = 0
        while first < len(block_ids):
            ids = block_ids[first : first + self.blocks()]
            yield first, ids
            first += len(ids)


class LeadTime:
    """How long a suspended request takes to reach the destination's engine, on average.

    The answer's way back is in it, so that a request comes early rather than late.
    """

    def __init__(self) -> None:
        self.ms = FIRST_LEAD_MS

    def observe(self, answered_ms: float, commit_ms: float) -> None:
        """answered_ms: from the suspension to Committed; commit_ms: of it, in the engine."""
        self.ms = _average(self.ms, max(0.0, answered_ms - commit_ms))


class MeasuredPause(NamedTuple):
    """One pause, milliseconds."""

    tail_copy_ms: float
    answered_ms: float
    """Time from the suspension to Committed: the copy of the tail, the commit, and Commit's way and
    the answer's, equally long."""
    commit_ms: float
    """Time of the commit in the destination's engine."""
    first_token_ms: float
    """Time from the end of the commit to the end of the first step."""


class PauseTime:
    """How much longer than a step clients wait for the token after a pause: the average, and twice
    what pauses differ from it on average. A pause that turns out shorter costs its client nothing;
    one that turns out longer is a gap.

    busy: whether the destination makes steps of its own, which a request that comes waits for.
    """

    def __init__(self) -> None:
        self._known: dict[bool, tuple[float, float]] = {}
        """Average and average deviation, milliseconds."""

    def expected_ms(self, busy: bool, step_ms: float) -> float:
        """The next pause's, by those before it. step_ms: from one token to the next."""
        if (known := self._known.get(busy)) is None:
            return max(FIRST_PAUSE_MS, FIRST_PAUSE_STEPS * step_ms)
        ms, off_ms = known
        return ms + DEVIATIONS * off_ms

    def observe(self, busy: bool, pause: MeasuredPause, step_ms: float) -> None:
        """step_ms: from one token to the next at the source."""
        way_ms = max(0.0, pause.answered_ms - pause.tail_copy_ms - pause.commit_ms) / 2
        until_first_ms = pause.tail_copy_ms + way_ms + pause.commit_ms + pause.first_token_ms
        over_ms = max(0.0, until_first_ms - step_ms)
        if (known := self._known.get(busy)) is None:
            self._known[busy] = over_ms, 0.0
            return
        ms, off_ms = known
        self._known[busy] = _average(ms, over_ms), _average(off_ms, abs(over_ms - ms))


class BlockRate:
    """KV blocks per second that live stages sent, on average; newer migrations weigh more."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.blocks_s = 0.0
        """0: none was measured."""

    def observe(self, report: MigrationReport) -> None:
        """A migration has ended, well or not; what it copied live counts."""
        ms = sum(stage.ms for stage in report.stages)
        nbytes = sum(stage.bytes for stage in report.stages)
        if ms > 0 and nbytes > 0:
            rate = nbytes / self._block_bytes / (ms / 1000)
            self.blocks_s = _average(self.blocks_s or None, rate, RATE_WEIGHT)


def _average(known: float | None, measured: float, weight: float = WEIGHT) -> float:
    return measured if known is None else known + weight * (measured - known)
