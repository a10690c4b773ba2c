"""A balloon in vLLM's block pool: blocks that the engine may not use, whose pages others have.

vLLM's KV cache is as large as it may become. The balloon holds, as a request would, the blocks that
are beyond the quota; it takes and frees them between two steps. To vLLM's scheduler, and to
all that read its load, the pool is as large as the quota.

What is taken first: free blocks, then the least recently used ones of the prefix cache,
as vLLM itself reuses them. Beyond that the engine owes: it admits nothing, and gives what becomes
free, as its requests end or move elsewhere. Only then it preempts, the last one first.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any

import numpy as np
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvmig.core.errors import KvmigError
from kvmig.engines.backing import CacheBacking
from kvmig.engines.base import CacheRoom, EngineLoad, KVUse
from kvmig.engines.block_copies import BlockCopies
from kvmig.engines.gate import StepGate
from kvmig.engines.vllm.tables import RequestTables

log = logging.getLogger(__name__)

GROWTH_BLOCKS = 4
"""Blocks that a running request is expected to want besides, soon, unless it ends before."""
RETRY_S = 0.05
"""Time until an engine whose next request fits, and couldn't start, looks again by itself."""
STARVED_S = 0.5
"""The same where it doesn't fit."""
SHORT_S = 1.0
"""Time after a lack of memory until it is asked for again."""
SPARE_BLOCKS = 2
"""Blocks of the floor besides those of the longest request: vLLM's null block, and one ahead."""


def unshared(config: VllmConfig, tables: RequestTables | None = None, unmovable: str = "") -> str:
    """Why an engine's KV cache can't have a balloon, in a few words; empty when it can.

    tables, unmovable: once the engine is made. Before, some of those that can't aren't known.
    """
    if config.parallel_config.world_size > 1:
        return "several workers"
    if config.kv_transfer_config is not None:
        return "a KV connector, which reads blocks that are free"
    if unmovable:
        return unmovable
    return "" if tables is None or tables.plain else "KV cache of several kinds, windows or states"


class CacheBalloon:
    """The balloon of one engine. All but `use` runs on its thread, between two steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        tables: RequestTables,
        backing: CacheBacking,
        copies: BlockCopies,
        call: Callable[[Callable[[], None]], object],
    ) -> None:
        """Takes all but one group, which nothing was written to. call: runs something on the
        engine's thread soon, from any thread."""
        self._patience_s = 0.0
        self._scheduler = scheduler
        self._tables = tables
        self._backing = backing
        self._copies = copies
        self._call = call
        manager = scheduler.kv_cache_manager
        self._manager, self._pool = manager, manager.block_pool
        self._virtual = self._pool.num_gpu_blocks
        self._watermark = manager.watermark_blocks / self._virtual
        self._out: list[list[KVCacheBlock]] = []
        """Groups whose pages are given back."""
        self._giving = 0
        """Groups whose pages are being given back."""
        self._news = False
        self._absent = np.zeros(self._virtual, np.bool_)
        copies.absent = self._absent, tables.units.per_block
        self._owes_since: float | None = None
        self._short_until = 0.0
        self.closed = False
        """Whether none is to be admitted: where none runs, vLLM admits without a watermark."""
        self._limit = self._virtual
        groups = self._virtual // backing.group
        self.room = CacheRoom(
            floor=min(groups, self._groups_of(scheduler.max_model_len)) * backing.group_bytes,
            capacity=groups * backing.group_bytes,
            granule=backing.group_bytes,
        )
        self._quota = backing.group
        self._out = hold(self._pool, groups - 1, backing.group)
        self._mark(self._out, absent=True)
        self._resized()
        self.use = KVUse(0, 0, 0, 0)
        """What it holds; a snapshot, from any thread."""
        self.on_use: Callable[[], None] = lambda: None
        """Called on the engine's thread when that has changed."""

    def resize(self, quota: int, limit: int, patience_s: float) -> None:
        """See `kvmig.engines.base.CacheSharing`; it happens between the steps that follow."""
        group = self._backing.group
        self._quota = max(1, min(quota, self.room.capacity) // self.room.granule) * group
        self._limit = max(1, limit // self.room.granule) * group
        self._patience_s, self._owes_since = patience_s, None

    def between_steps(self) -> bool:
        """Towards the quota, as far as that goes now; whether there is anything new to see."""
        self.closed = False
        if self._pool.num_gpu_blocks < self._quota:
            self._deflate()
        elif self._pool.num_gpu_blocks > self._quota:
            self._inflate()
        news, self._news = self._news, False
        return news

    def rest_s(self) -> float:
        """How long a step would be in vain, unless something comes for the engine; 0: none would.

        After a step that could compute nothing: where what waits doesn't fit, only an order or
        blocks that become free help, and both come through the engine's queue.
        """
        scheduler, pool = self._scheduler, self._pool
        if scheduler.running or pool.num_gpu_blocks == self._virtual:
            return 0.0
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        head = next((one.peek_request() for one in queues if one), None)
        if head is None:
            return RETRY_S
        needs = self._tables.demand(head.num_tokens) // self._tables.units.per_block
        fits = needs <= pool.get_num_free_blocks() - self._manager.watermark_blocks
        return RETRY_S if fits else STARVED_S

    def renew_use(self, load: EngineLoad) -> EngineLoad:
        """Renew `use`; the load as others shall see it: of an engine as large as the quota."""
        per_block = self._tables.units.per_block
        pool, size = self._pool, self.room.granule // self._backing.group
        free = pool.get_num_free_blocks()
        used = pool.num_gpu_blocks - free
        growth = sum(self._grows(one) for one in self._scheduler.running)
        wanted = used + load.waiting_blocks // per_block + growth
        use = KVUse(
            lease=pool.num_gpu_blocks * size + self._giving * self.room.granule,
            used=used * size,
            cached=min(free, len(pool.cached_block_hash_to_block)) * size,
            wanted=wanted * size,
        )
        if use != self.use:
            self.use = use
            self.on_use()
        return replace(
            load,
            total_blocks=(min(self._quota, self._pool.num_gpu_blocks) - 1) * per_block,
            limit_blocks=(min(self._limit, self._virtual) - 1) * per_block,
        )

    # -- more

    def _deflate(self) -> None:
        self._owes_since = None
        lacks = (self._quota - self._pool.num_gpu_blocks) // self._backing.group
        taken = self._take_back(min(lacks, len(self._out)))
        if not taken:
            return
        del self._out[-len(taken) :]
        self._mark(taken, absent=False)
        self._pool.free_blocks(block for one in taken for block in one)
        self._resized()

    def _take_back(self, groups: int) -> list[list[KVCacheBlock]]:
        """The groups, of the last `groups`, that have memory now. A GPU may have less left than the
        unit's agent thinks: what isn't there is asked for again, soon, and the engine goes on
        without."""
        if time.monotonic() < self._short_until:
            return []
        while groups:
            taken = self._out[-groups:]
            try:
                self._backing.take_pages([_number(one, self._backing.group) for one in taken])
            except KvmigError as error:
                self._short_until = time.monotonic() + SHORT_S
                log.warning("%d groups of blocks got no memory: %s", groups, error)
                groups //= 2
            else:
                return taken
        return []

    # -- less

    def _inflate(self) -> None:
        now = time.monotonic()
        if self._owes_since is None:
            self._owes_since = now
        scheduler, late = self._scheduler, now - self._owes_since >= self._patience_s
        self._take_free(spare=0 if late else len(scheduler.running))
        while late and self._owed and len(scheduler.running) > self._kept:
            if scheduler.deferred_frees:
                break  # by a step in flight; that may be enough
            self._preempt()
            self._take_free(spare=0)
        self._resized()
        self.closed = late and self._owed > 0 and len(scheduler.running) == self._kept == 0

    @property
    def _owed(self) -> int:
        """Groups that it has beyond its quota."""
        return -(-(self._pool.num_gpu_blocks - self._quota) // self._backing.group)

    @property
    def _kept(self) -> int:
        """Requests that aren't preempted. Where blocks share pages even one may hold more groups
        than it needs: it is computed again, in as few."""
        fits = self._quota * self.room.granule >= self.room.floor * self._backing.group
        return 0 if self._backing.group > 1 and fits else 1

    def _take_free(self, spare: int) -> None:
        """spare: blocks to leave to requests that run, for what they grow by."""
        free = self._pool.get_num_free_blocks() - spare
        groups = min(self._owed, free // self._backing.group)
        taken = hold(self._pool, groups, self._backing.group) if groups > 0 else []
        if not taken:
            return
        self._pool.num_gpu_blocks -= len(taken) * self._backing.group
        self._giving += len(taken)
        numbers = [_number(one, self._backing.group) for one in taken]

        def give() -> list[int]:
            # On the copy thread, behind the copies that read these blocks; later ones are refused.
            self._mark(taken, absent=True)
            self._backing.give_pages(numbers)
            return []

        def given(done: Future[Any]) -> None:
            self._call(lambda: self._given(taken, done))

        self._copies.submit(give).add_done_callback(given)

    def _given(self, taken: list[list[KVCacheBlock]], done: Future[Any]) -> None:
        if (error := done.exception()) is not None:  # it has that memory still, and says so
            log.error("%d groups of blocks aren't given back: %s", len(taken), error)
            return
        self._giving -= len(taken)
        self._news = True
        self._out += taken

    def _preempt(self) -> None:
        """Preempt as vLLM does when it runs out of blocks, and as it does between two steps."""
        scheduler = self._scheduler
        request: Request
        if scheduler.policy is SchedulingPolicy.PRIORITY:
            request = max(scheduler.running, key=lambda one: (one.priority, one.arrival_time))
            scheduler.running.remove(request)
        else:
            request = scheduler.running.pop()
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    # -- helpers

    def _resized(self) -> None:
        blocks = self._virtual - len(self._out) * self._backing.group
        blocks -= self._giving * self._backing.group
        self._news = self._news or blocks != self._pool.num_gpu_blocks
        self._pool.num_gpu_blocks = blocks
        owes = blocks > self._quota
        # What waits must not take what is owed.
        self._manager.watermark_blocks = blocks if owes else int(self._watermark * blocks)

    def _mark(self, groups: list[list[KVCacheBlock]], *, absent: bool) -> None:
        self._absent[[block.block_id for one in groups for block in one]] = absent

    def _grows(self, request: Request) -> int:
        """Blocks that it may want besides, soon: for the rest of its prompt, and for some tokens
        after it. KV of its last token is never computed."""
        last = min(request.num_prompt_tokens + request.max_tokens, self._scheduler.max_model_len)
        per_block, demand = self._tables.units.per_block, self._tables.demand
        soon = demand(request.num_tokens) + GROWTH_BLOCKS * per_block
        left = min(demand(last - 1), soon) - demand(request.num_computed_tokens)
        return max(0, left // per_block)

    def _groups_of(self, tokens: int) -> int:
        per_block = self._tables.units.per_block
        blocks = self._tables.demand(tokens) // per_block + SPARE_BLOCKS
        return -(-blocks // self._backing.group)


def hold(pool: BlockPool, groups: int, size: int) -> list[list[KVCacheBlock]]:
    """Take `groups` groups of `size` blocks out of vLLM's pool, or all that are free: those first
    whose blocks vLLM would reuse first."""
    if size == 1:
        return [[block] for block in pool.get_new_blocks(groups)]
    free: list[list[KVCacheBlock]] = []
    # Groups in use are seen to be so by their first blocks; a walk along the free blocks would
    # take ten times as long, in each step as long as any are owed.
    for at in range(size, len(pool.blocks), size):  # vLLM's null block is in the first group
        group = pool.blocks[at : at + size]
        for block in group:
            if block.ref_cnt:
                break
        else:
            free.append(group)
    if len(free) > groups:
        free = list(islice(_reused_first(pool, size), groups))
    blocks = [block for group in free for block in group]
    pool.evict_blocks({block.block_id for block in blocks})
    pool.touch(blocks)
    return free


def _reused_first(pool: BlockPool, size: int) -> Iterator[list[KVCacheBlock]]:
    """The groups that are free, in the order in which vLLM will have reused all their blocks."""
    groups: defaultdict[int, list[KVCacheBlock]] = defaultdict(list)
    for block in pool.free_block_queue.iter_blocks_after(None):
        group = groups[block.block_id // size]
        group.append(block)
        if len(group) == size:
            yield group


class VllmSharing:
    """Implements `kvmig.engines.base.CacheSharing` for an engine with a balloon."""

    def __init__(
        self,
        balloon: CacheBalloon,
        on_engine: Callable[[Callable[[], None]], Awaitable[None]],
        share: Callable[[StepGate], None],
        unlimited: str = "",
    ) -> None:
        """share: ask that gate before each step; called on the engine's thread."""
        self.room, self.unlimited = balloon.room, unlimited
        self._balloon = balloon
        self._on_engine = on_engine
        self._share = share

    @property
    def use(self) -> KVUse:
        """See `CacheSharing`."""
        return self._balloon.use

    def watch(self, on_use: Callable[[], None]) -> None:
        """See `CacheSharing`."""
        self._balloon.on_use = on_use

    async def resize(self, quota: int, limit: int, patience_s: float) -> None:
        """See `CacheSharing`."""
        await self._on_engine(lambda: self._balloon.resize(quota, limit, patience_s))

    async def gated(self, gate: StepGate) -> None:
        """See `CacheSharing`."""
        await self._on_engine(lambda: self._share(gate))


def _number(group: list[KVCacheBlock], size: int) -> int:
    return int(group[0].block_id) // size
