"""A request's block tables, one for each of vLLM's KV cache groups, and which blocks must travel.

Layers whose KV cache grows alike are a group: all layers of Llama; the windowed and the full ones
of Gemma 3; attention and states of Granite 4. Each request has a block table for each group, and a
block of any group is the same bytes to a copy.

- attention: block b holds the tokens from `b * block_tokens` on. Full ones don't change any more.
  What lies outside a window is vLLM's null block at the source, and doesn't travel.
- state: of all tokens so far in one block, rewritten each step. It travels in the tail only.

Both ends name a block by its place: block b of table t is at `b * tables + t`, a state at `t`.

Example: one table of full attention: places 0, 1, 2, ... are the request's blocks in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvmig.engines.base import HOLE
from kvmig.engines.vllm.subblocks import SubBlocks

NULL_BLOCK = 0
"""vLLM's id for a block that a request doesn't have."""
_MOVED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)


@dataclass(frozen=True, slots=True)
class GroupTable:
    """One KV cache group. `block_tokens`: of one block; window: only the last tokens are kept.

    most: blocks that a request takes at most, if that is bounded.
    """

    block_tokens: int
    state: bool = False
    window: bool = False
    most: int | None = None


@dataclass(slots=True)
class SentBlocks:
    """Which of a request's blocks the destination has, or was sent."""

    hit_tokens: int
    hits: int
    """How `hit_tokens` are counted among the blocks that were sent."""
    places: list[int] = field(default_factory=list)
    """Places of the blocks that were named after them, in order."""

    def back_to(self, sent: int) -> None:
        """Forget the blocks that were named beyond the first `sent`: they didn't go."""
        del self.places[max(0, sent - self.hits) :]


class RequestTables:
    """The block tables of each request of one engine; block ids are those of `units`."""

    def __init__(self, scheduler: Scheduler, units: SubBlocks) -> None:
        groups = scheduler.kv_cache_config.kv_cache_groups
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._tables = tuple(
            _table(group, manager.max_admission_blocks_per_request)
            for group, manager in zip(groups, self._managers, strict=True)
        )
        self.units = units
        unknown = [kind for group in groups for kind in _unknown(group)]
        self.unmovable = f"KV cache kind {unknown[0]}" if unknown else ""
        """Why requests with these tables can't be moved; empty where they can."""
        if units.per_block > 1 and not self.plain:
            self.unmovable = "only blocks of full attention can be cut in units"
        if self.plain:
            self._tables = (GroupTable(units.tokens),)

    @property
    def plain(self) -> bool:
        """Whether there is one table, of full attention: nothing is left out or rewritten."""
        return len(self._tables) == 1 and not (self._tables[0].state or self._tables[0].window)

    @property
    def count(self) -> int:
        """Block tables of a request."""
        return len(self._tables)

    @property
    def states(self) -> list[int]:
        """Which tables are states."""
        return [number for number, table in enumerate(self._tables) if table.state]

    @property
    def spare_tokens(self) -> int:
        """Tokens that the largest block of attention holds; 1 if there are states alone."""
        sizes = [one.block_tokens for one in self._tables if not one.state]
        return max(sizes, default=1) * self.units.per_block

    @property
    def block_tokens(self) -> int:
        """Tokens of the smallest block: what prefix hits are counted in."""
        sizes = [one.block_tokens for one in self._tables if not one.state]
        return min(sizes, default=self._tables[0].block_tokens)

    def count_blocks(self, block_ids: Sequence[Sequence[int]]) -> int:
        """Blocks that are the request's, over all tables."""
        return sum(block != NULL_BLOCK for ids in block_ids for block in ids) * self.units.per_block

    def demand(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens takes, over all tables."""
        return sum(self._blocks(table, tokens) for table in self._tables) * self.units.per_block

    def _blocks(self, table: GroupTable, tokens: int) -> int:
        """The scheduler's own, of one table."""
        if table.state:
            return 1
        blocks = -(-tokens // (table.block_tokens * self.units.per_block))
        return blocks if table.most is None else min(blocks, table.most)

    def by_place(self, block_ids: Sequence[Sequence[int]], hit_tokens: int) -> list[int]:
        """Block ids by their places; HOLE where the request has none of its own.

        hit_tokens: whose blocks the prefix cache shares (except for a plain table, where hits are
        the first places).
        """
        if self.plain:
            return self.units.ids(block_ids[0])
        longest = max(len(ids) for ids in block_ids)
        ids = [HOLE] * (longest * self.count)
        for number, (table, mine) in enumerate(zip(self._tables, block_ids, strict=True)):
            if table.state:
                ids[number] = next((block for block in mine if block != NULL_BLOCK), HOLE)
                continue
            for at in range(hit_tokens // table.block_tokens, len(mine)):
                if mine[at] != NULL_BLOCK:
                    ids[at * self.count + number] = mine[at]
        return ids

    def full(
        self, block_ids: Sequence[Sequence[int]], computed: int, sent: SentBlocks
    ) -> tuple[list[int], list[int]]:
        """Full blocks that weren't sent: (places, block ids). No step writes them any more."""
        return self._unsent(block_ids, computed, sent, tail=False)

    def unsent_blocks(
        self, block_ids: Sequence[Sequence[int]], computed: int, sent: SentBlocks
    ) -> tuple[list[int], list[int]]:
        """The blocks that were not sent of a request that no step holds: (places, block ids)."""
        return self._unsent(block_ids, computed, sent, tail=True)

    def _unsent(
        self, block_ids: Sequence[Sequence[int]], computed: int, sent: SentBlocks, *, tail: bool
    ) -> tuple[list[int], list[int]]:
        places: list[int] = []
        ids: list[int] = []
        known, count = set(sent.places), self.count
        for number, table in enumerate(self._tables):
            mine, size = self.units.ids(block_ids[number]), table.block_tokens
            if table.state:
                if tail and computed:
                    places.append(number)
                    ids.append(mine[(computed - 1) // size])
                continue
            # The first block that the next step reads and the destination didn't hit. The source
            # may hold some before it: vLLM frees what has left a window in its next step.
            outside = self._managers[number].get_num_skipped_tokens(computed)
            end = -(-computed // size) if tail else computed // size
            for at in range(max(sent.hit_tokens, outside) // size, end):
                place = at * count + number
                if place not in known and (self.plain or mine[at] != NULL_BLOCK):
                    places.append(place)
                    ids.append(mine[at])
        return places, ids


def layer_names(config: KVCacheConfig) -> list[str]:
    """Layers with a KV cache."""
    return [name for group in config.kv_cache_groups for name in group.layer_names]


def _table(group: KVCacheGroupSpec, most: int | None) -> GroupTable:
    spec = group.kv_cache_spec
    kinds = _kinds(group)
    state = all(issubclass(kind, MambaSpec) for kind in kinds)
    full = all(issubclass(kind, FullAttentionSpec) for kind in kinds)
    window = not full or any(issubclass(kind, RSWASpec) for kind in kinds)
    return GroupTable(spec.block_size, state, window and not state, None if state else most)


def _unknown(group: KVCacheGroupSpec) -> list[str]:
    """Kinds of KV cache that can't be moved."""
    if group.host_resident:
        return ["in the host's memory"]
    if getattr(group.kv_cache_spec, "num_speculative_blocks", 0):
        return ["of states with speculative decoding"]
    return [
        kind.__name__
        for kind in _kinds(group)
        if not issubclass(kind, _MOVED) or issubclass(kind, HiddenStateCacheSpec)
    ]


def _kinds(group: KVCacheGroupSpec) -> set[type[KVCacheSpec]]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {type(one) for one in spec.kv_cache_specs.values()}
    return {type(spec)}
