"""Sessions that no request belongs to now: their blocks leave one prefix cache and enter another.

A session that moves is a migration whose request vLLM's scheduler never knows. At the source
(`PrefixSource`) its blocks are found by vLLM's own hashes and held, so that they aren't evicted
while they are copied. At the destination (`PrefixDestination`) blocks are reserved, filled, put
into the prefix cache under that engine's hashes, and freed: cached, and evicted as any others.
Salt, LoRA adapter and media are in the hashes, so a prompt never finds another tenant's blocks.

What travels is what vLLM's own look-up of that beginning takes: of full attention every block, of a
sliding window, or of attention in chunks, those that the next token reads. A state is another
matter: it stands for all tokens before it, and a cache has it at few places.

All but `beginning_of` runs on the engine's thread between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.engines.base import RequestTail, StagedBlocks
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.migration import Weights, check_awake, check_unchanged_weights
from kvmig.engines.vllm.offload import CacheOffload
from kvmig.engines.vllm.tables import RequestTables, SentBlocks


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


@dataclass(frozen=True)
class CachedBeginning:
    """The blocks of the first tokens of a request, as one that reads on from there needs them."""

    tables: list[list[KVCacheBlock]]
    """Blocks of each of vLLM's KV cache groups; vLLM's null block where none is needed."""
    tokens: int

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """Blocks of all tables, the first tokens' first."""
        rows = zip_longest(*self.tables)
        return [one for row in rows for one in row if one is not None and not one.is_null]

    @property
    def ids(self) -> list[list[int]]:
        """Their ids by table."""
        return [[one.block_id for one in blocks] for blocks in self.tables]


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
        """Tokens of vLLM's largest block, of which all others are parts."""

    @property
    def unmovable(self) -> str:
        """Why nothing of this cache moves by itself, in a few words; empty when it does."""
        if self.core.request_block_hasher is None or not self._manager.enable_caching:
            return "an engine without a prefix cache"
        if self._tables.states:
            return "states, which a prefix cache has at few places"
        if not self._tables.plain and self._manager.coordinator.eagle_group_ids:
            return "windows with a drafter that reads one block more"
        return ""

    def find(self, request: Request, most: int) -> CachedBeginning:
        """Blocks that hold the first tokens of the request, at most `most` tokens; now held."""
        found, tokens, _ = self._manager.get_computed_blocks(request)
        if tokens > most:  # a window's blocks are those before the end that was found
            tokens = most if self._tables.plain else 0
        tokens -= tokens % self.block_tokens
        tables = [
            self._within(number, list(blocks), tokens) for number, blocks in enumerate(found.blocks)
        ]
        beginning = CachedBeginning(tables, tokens)
        self._pool.touch(beginning.blocks)
        return beginning

    def extend(self, held: CachedBeginning, tokens: int) -> CachedBeginning:
        """What is held, and new blocks up to `tokens` tokens, as long as those who run keep room to
        grow. Raises MigrationRefused, and holds what it held."""
        tables = [
            self._within(number, list(blocks), tokens) for number, blocks in enumerate(held.tables)
        ]
        ends = [tokens // manager.block_size for manager in self._managers]
        count = sum(end - len(table) for end, table in zip(ends, tables, strict=True))
        new = iter(self._take_blocks(count))
        for end, table in zip(ends, tables, strict=True):
            table += [next(new) for _ in range(end - len(table))]
        whole = CachedBeginning(tables, tokens)
        kept = {block.block_id for block in whole.blocks}
        self._pool.free_blocks(one for one in held.blocks if one.block_id not in kept)
        return whole

    def _within(self, number: int, blocks: list[KVCacheBlock], tokens: int) -> list[KVCacheBlock]:
        """The blocks of one table that a request of `tokens` tokens reads; vLLM's null block stands
        for each of the others."""
        manager = self._managers[number]
        outside = manager.get_num_skipped_tokens(tokens) // manager.block_size
        return [self._pool.null_block] * outside + blocks[outside : tokens // manager.block_size]

    def _take_blocks(self, count: int) -> list[KVCacheBlock]:
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

    def cache(self, request: Request, whole: CachedBeginning, cached: int) -> None:
        """Let prompts that begin like the request find the blocks; those of the first `cached`
        tokens are found."""
        for number, (manager, blocks) in enumerate(zip(self._managers, whole.tables, strict=True)):
            size = manager.block_size
            self._pool.cache_full_blocks(
                request, blocks, cached // size, len(blocks), size, kv_cache_group_id=number
            )

    def free(self, beginning: CachedBeginning) -> None:
        """Release a beginning; its last blocks are evicted first."""
        self._pool.free_blocks(reversed(beginning.blocks))

    def forget(self, beginning: CachedBeginning, shared_tokens: int) -> None:
        """Let no prompt find these blocks again, except for those of the first tokens and those
        that others hold, too."""
        ids = set()
        for manager, blocks in zip(self._managers, beginning.tables, strict=True):
            own = blocks[shared_tokens // manager.block_size :]
            ids |= {one.block_id for one in own if not one.is_null and one.ref_cnt == 1}
        self._pool.evict_blocks(ids)

    def unsent(self, beginning: CachedBeginning, sent: SentBlocks) -> tuple[list[int], list[int]]:
        """The blocks that were not sent: (places, ids), of blocks or units of them."""
        return self._tables.full(beginning.ids, beginning.tokens, sent)

    def by_place(self, whole: CachedBeginning, hit_tokens: int) -> list[int]:
        """Ids of all blocks, or units of them, by their places."""
        return self._tables.by_place(whole.ids, hit_tokens)

    def hits(self, tokens: int) -> int:
        """Tokens as prefix hits are counted: in the smallest blocks, or in units."""
        return tokens // self._tables.block_tokens

    def sent(self, hits: int) -> SentBlocks:
        """What a destination has whose prefix cache held these."""
        return SentBlocks(hits * self._tables.block_tokens, hits)

    @property
    def _managers(self) -> tuple[SingleTypeKVCacheManager, ...]:
        """vLLM's manager of each block table."""
        return tuple(self._manager.coordinator.single_type_managers)


@dataclass
class LeavingPrefix:
    """A session's blocks that are held here while it moves."""

    beginning: CachedBeginning
    weights: str
    shared_tokens: int
    """The first tokens, which other sessions have, too: their blocks stay cached here."""
    sent: SentBlocks | None = None
    """Known from the first stage, or the tail, on."""


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
        beginning = pool.find(request, request.num_tokens)
        if not beginning.tokens:
            raise MigrationRefused("finished", "nothing of it is in the prefix cache any more")
        self._leaving[request_id] = LeavingPrefix(beginning, pool.weights(), shared_tokens)
        return beginning.tokens

    def stage(self, request_id: str, sent: int) -> StagedBlocks:
        """Name the blocks after the first `sent`: none of them changes."""
        leaving = self._checked(request_id)
        if leaving.sent is None:
            leaving.sent = self._pool.sent(sent)
        leaving.sent.back_to(sent)
        places, ids = self._pool.unsent(leaving.beginning, leaving.sent)
        leaving.sent.places += places
        return StagedBlocks(ids, leaving.beginning.tokens, places=places)

    def suspend(self, request_id: str, sent: int) -> RequestTail:
        """What no stage has named."""
        stage = self.stage(request_id, sent)
        return RequestTail(stage.block_ids, stage.num_tokens, 0, b"", places=stage.places)

    def resume(self, request_id: str) -> None:
        """Keep the session: its blocks are cached as before."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None:
            self._pool.free(leaving.beginning)

    def release(self, request_id: str) -> None:
        """Give the session up: its blocks are free, except for those that others have, too."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None:
            self._pool.forget(leaving.beginning, leaving.shared_tokens)
            self._pool.free(leaving.beginning)

    def _checked(self, request_id: str) -> LeavingPrefix:
        check_awake(self._pool.core)
        leaving = self._leaving.get(request_id)
        if leaving is None:
            raise RequestGone("finished", f"{request_id} is not held here")
        check_unchanged_weights(leaving.weights, self._pool.weights())
        return leaving


@dataclass
class ArrivingPrefix:
    """A session whose blocks come."""

    request: Request
    whole: CachedBeginning
    hit_tokens: int
    """The first tokens, whose blocks were cached here before."""
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

    def reserve(self, request: Request, tokens: int, weights: str) -> int:
        """Take blocks for the first `tokens` of the request's; how many hold them already.

        weights: those of the source.
        """
        pool, request_id = self._pool, request.request_id
        check_awake(pool.core)
        check_unchanged_weights(weights, pool.weights())
        if pool.unmovable:
            raise MigrationRefused("unsupported", pool.unmovable)
        if request_id in self._arriving:
            raise MigrationRefused("already_migrating", f"{request_id} is here already")
        if tokens % pool.block_tokens or not 0 < tokens <= request.num_tokens:
            why = f"{tokens} tokens are no blocks of {pool.block_tokens} tokens"
            raise MigrationRefused("incompatible", why)
        held = pool.find(request, tokens)
        try:
            whole = pool.extend(held, tokens)
        except MigrationRefused:
            pool.free(held)
            raise
        self._arriving[request_id] = ArrivingPrefix(request, whole, held.tokens, weights)
        return pool.hits(held.tokens)

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Ids of all blocks, by their places."""
        check_awake(self._pool.core)
        arriving = self._known(request_id)
        if num_tokens > arriving.whole.tokens:
            raise MigrationRefused("no_blocks", f"{num_tokens} tokens were never reserved")
        return self._pool.by_place(arriving.whole, arriving.hit_tokens)

    def commit(self, request_id: str) -> None:
        """Let prompts find the blocks, which have come, until others need the room."""
        check_awake(self._pool.core)
        arriving = self._known(request_id)
        check_unchanged_weights(arriving.weights, self._pool.weights())
        self._pool.cache(arriving.request, arriving.whole, arriving.hit_tokens)
        self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Free a reservation. Unknown ids are ignored."""
        arriving = self._arriving.pop(request_id, None)
        if arriving is not None:
            self._pool.free(arriving.whole)

    def _known(self, request_id: str) -> ArrivingPrefix:
        arriving = self._arriving.get(request_id)
        if arriving is None:
            raise MigrationRefused("unknown_request", f"{request_id} has no reservation here")
        return arriving
