"""Sessions that no request belongs to now: their blocks leave one prefix cache and enter another.

A session that moves is a migration whose request vLLM's scheduler never knows. At the source
(`PrefixSource`) its blocks are found by vLLM's own hashes and held, so that they aren't evicted
while they are copied. At the destination (`PrefixDestination`) blocks are reserved, filled, put
into the prefix cache under that engine's hashes, and freed: cached, and evicted as any others.
Salt, LoRA adapter and media are in the hashes, so a prompt never finds another tenant's blocks.

All but `beginning_of` runs on the engine's thread between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.engines.base import Stage, Tail
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.migration import check_awake
from kvmig.engines.vllm.offload import CacheOffload
from kvmig.engines.vllm.tables import RequestTables

Weights = Callable[[], str]
"""The identity of the engine's weights now."""


def beginning_of(
    submitted: EngineCoreRequest, request_id: str, output_token_ids: Sequence[int]
) -> EngineCoreRequest:
    """What a prefix cache keeps of a request: its tokens, salt, adapter and media's identifiers.

    Raises MigrationRefused for a request whose beginning has other names than its tokens.
    """
    if submitted.prompt_token_ids is None or submitted.prompt_embeds is not None:
        raise MigrationRefused("unsupported", "prompt embeddings")
    media = [replace(one, data=None) for one in submitted.mm_features or ()]
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[*submitted.prompt_token_ids, *output_token_ids],
        mm_features=media or None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=submitted.arrival_time,
        lora_request=submitted.lora_request,
        cache_salt=submitted.cache_salt,
        data_parallel_rank=None,
    )


class PrefixPool:
    """The prefix cache of one engine, as far as both ends of a session's move need it."""

    def __init__(
        self, core: StepCore, tables: RequestTables, offload: CacheOffload, weights: Weights
    ) -> None:
        self.core = core
        self.weights = weights
        self._tables = tables
        self._offload = offload
        self._manager = core.scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self.block_tokens = core.scheduler.block_size
        """Tokens of one of vLLM's blocks."""

    @property
    def unmovable(self) -> str:
        """Why nothing of this cache moves by itself, in a few words; empty when it does."""
        if self.core.request_block_hasher is None or not self._manager.enable_caching:
            return "an engine without a prefix cache"
        return "" if self._tables.plain else "windows or states, of which a cache has no whole copy"

    def find(self, request: Request, most: int) -> list[KVCacheBlock]:
        """Blocks that hold the first tokens of the request, at most `most` tokens; now held."""
        found, tokens, _ = self._manager.get_computed_blocks(request)
        blocks = list(found.blocks[0][: min(tokens, most) // self.block_tokens])
        self._pool.touch(blocks)
        return blocks

    def take_blocks(self, count: int) -> list[KVCacheBlock]:
        """New blocks, as long as those who run keep room to grow. Raises MigrationRefused."""
        free = self._pool.get_num_free_blocks() - self._manager.watermark_blocks
        if count > free:
            raise MigrationRefused("no_blocks", f"no room for {count} blocks, {max(0, free)} left")
        blocks: list[KVCacheBlock] = self._pool.get_new_blocks(count)
        try:
            self._offload.check_unread(block.block_id for block in blocks)
        except MigrationRefused:
            self._pool.free_blocks(blocks)
            raise
        return blocks

    def cache(self, request: Request, blocks: list[KVCacheBlock], cached: int) -> None:
        """Let prompts that begin like the request find `blocks`; the first `cached` are found."""
        self._pool.cache_full_blocks(
            request, blocks, cached, len(blocks), self.block_tokens, kv_cache_group_id=0
        )

    def free(self, blocks: list[KVCacheBlock]) -> None:
        """Hold them no more; the last ones are evicted first."""
        self._pool.free_blocks(reversed(blocks))

    def forget(self, blocks: list[KVCacheBlock]) -> None:
        """Let no prompt find these blocks again, except for those that others hold, too."""
        self._pool.evict_blocks({block.block_id for block in blocks if block.ref_cnt == 1})

    def ids(self, blocks: list[KVCacheBlock]) -> list[int]:
        """Ids of what is copied: blocks, or units of them."""
        return self._tables.units.ids([block.block_id for block in blocks])

    def units(self, blocks: int) -> int:
        """The number of copied units in this number of blocks."""
        return blocks * self._tables.units.per_block


@dataclass
class LeavingPrefix:
    """A session's blocks that are held here while it moves."""

    blocks: list[KVCacheBlock]
    weights: str
    shared: int
    """The first blocks, which other sessions have, too: they stay cached here."""


class PrefixSource:
    """Gives sessions up."""

    def __init__(self, pool: PrefixPool) -> None:
        self._pool = pool
        self._leaving: dict[str, LeavingPrefix] = {}

    @property
    def leaving(self) -> set[str]:
        """Sessions whose blocks are held, by the id of their move."""
        return set(self._leaving)

    def hold(self, request: Request, shared_tokens: int) -> int:
        """Hold what is cached of this beginning; its tokens. Raises MigrationRefused."""
        pool, request_id = self._pool, request.request_id
        check_awake(pool.core)
        if pool.unmovable:
            raise MigrationRefused("unsupported", pool.unmovable)
        if request_id in self._leaving:
            raise MigrationRefused("already_migrating", f"{request_id} is held already")
        blocks = pool.find(request, request.num_tokens)
        if not blocks:
            raise MigrationRefused("finished", "nothing of it is in the prefix cache any more")
        shared = shared_tokens // pool.block_tokens
        self._leaving[request_id] = LeavingPrefix(blocks, pool.weights(), shared)
        return len(blocks) * pool.block_tokens

    def stage(self, request_id: str, sent: int) -> Stage:
        """Name the blocks after the first `sent`: none of them changes."""
        leaving = self._checked(request_id)
        tokens = len(leaving.blocks) * self._pool.block_tokens
        return Stage(self._pool.ids(leaving.blocks)[sent:], tokens)

    def suspend(self, request_id: str, sent: int) -> Tail:
        """What no stage has named."""
        stage = self.stage(request_id, sent)
        return Tail(stage.block_ids, stage.num_tokens, 0, b"")

    def resume(self, request_id: str) -> None:
        """Keep the session: its blocks are cached as before."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None:
            self._pool.free(leaving.blocks)

    def release(self, request_id: str) -> None:
        """Give the session up: its blocks are free, except for those that others have, too."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None:
            self._pool.forget(leaving.blocks[leaving.shared :])
            self._pool.free(leaving.blocks)

    def _checked(self, request_id: str) -> LeavingPrefix:
        check_awake(self._pool.core)
        leaving = self._leaving.get(request_id)
        if leaving is None:
            raise RequestGone("finished", f"{request_id} is not held here")
        if leaving.weights != self._pool.weights():
            raise MigrationRefused("incompatible", "the weights were updated meanwhile")
        return leaving


@dataclass
class ArrivingPrefix:
    """A session whose blocks come."""

    request: Request
    blocks: list[KVCacheBlock]
    hits: int
    """The first blocks, which were cached here before."""
    weights: str


class PrefixDestination:
    """Takes sessions over."""

    def __init__(self, pool: PrefixPool) -> None:
        self._pool = pool
        self._arriving: dict[str, ArrivingPrefix] = {}

    @property
    def arriving(self) -> set[str]:
        """Sessions that have a reservation, by the id of their move."""
        return set(self._arriving)

    def reserve(self, request: Request, tokens: int) -> int:
        """Take blocks for the first `tokens` of the request's; how many hold them already."""
        pool, request_id = self._pool, request.request_id
        check_awake(pool.core)
        if pool.unmovable:
            raise MigrationRefused("unsupported", pool.unmovable)
        if request_id in self._arriving:
            raise MigrationRefused("already_migrating", f"{request_id} is here already")
        if tokens % pool.block_tokens or not 0 < tokens <= request.num_tokens:
            why = f"{tokens} tokens are no blocks of {pool.block_tokens} tokens"
            raise MigrationRefused("incompatible", why)
        held = pool.find(request, tokens)
        try:
            new = pool.take_blocks(tokens // pool.block_tokens - len(held))
        except MigrationRefused:
            pool.free(held)
            raise
        self._arriving[request_id] = ArrivingPrefix(request, held + new, len(held), pool.weights())
        return pool.units(len(held))

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Ids of all blocks, in order."""
        blocks = self._known(request_id).blocks
        if num_tokens > len(blocks) * self._pool.block_tokens:
            raise MigrationRefused("no_blocks", f"{num_tokens} tokens were never reserved")
        return self._pool.ids(blocks)

    def commit(self, request_id: str) -> None:
        """Let prompts find the blocks, which have come, until others need the room."""
        check_awake(self._pool.core)
        arriving = self._known(request_id)
        if arriving.weights != self._pool.weights():
            raise MigrationRefused("incompatible", "the weights were updated meanwhile")
        self._pool.cache(arriving.request, arriving.blocks, arriving.hits)
        self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Free a reservation. Unknown ids are ignored."""
        arriving = self._arriving.pop(request_id, None)
        if arriving is not None:
            self._pool.free(arriving.blocks)

    def _known(self, request_id: str) -> ArrivingPrefix:
        arriving = self._arriving.get(request_id)
        if arriving is None:
            raise MigrationRefused("unknown_request", f"{request_id} has no reservation here")
        return arriving
