"""The destination's side, on the engine's thread between two steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus

from kvmig.engines.vllm import lora, runner
from kvmig.engines.vllm.payload import Progress
from kvmig.engines.vllm.tables import Tables
from kvmig.ground.errors import MigrationRefused


@dataclass
class Arriving:
    """A request that is elsewhere still; one that runs there holds blocks here."""

    request: Request
    exported: Progress
    has_blocks: bool = False
    hit_tokens: int = 0
    """Whose blocks the prefix cache here held already."""


class Destination:
    """Reserves blocks for requests of other engines, and runs them after the commit."""

    def __init__(self, core: EngineCore, tables: Tables) -> None:
        self._core = core
        self._tables = tables
        self._arriving: dict[str, Arriving] = {}

    @property
    def _scheduler(self) -> Scheduler:
        scheduler = self._core.scheduler
        assert isinstance(scheduler, Scheduler)
        return scheduler

    def reserve(self, request: Request, exported: Progress) -> int:
        """Take blocks for the request; returns how many hold its prefix already.

        `request` carries the exported output tokens; it is not in the scheduler yet.
        """
        scheduler, request_id = self._scheduler, request.request_id
        if request_id in scheduler.requests or request_id in self._arriving:
            raise MigrationRefused("already_migrating", f"{request_id} is here already")
        if request.num_tokens > scheduler.max_model_len:
            raise MigrationRefused("incompatible", f"{request.num_tokens} tokens are too long")
        waits = exported.num_computed_tokens == 0
        if not waits:
            self._check_seat()
        lora.load_adapter(self._core, request)
        self._arriving[request_id] = arriving = Arriving(request, exported)
        if waits:
            return 0  # and it will wait here
        # As PREEMPTED the watermark holds for it: it must not squeeze out those who run here.
        request.status = RequestStatus.PREEMPTED
        try:
            self._take_blocks(arriving)
        except MigrationRefused:
            del self._arriving[request_id]
            raise
        return arriving.hit_tokens // self._tables.block_tokens

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Hold `num_tokens` tokens and one block spare; all block ids in order."""
        arriving = self._known(request_id)
        limit = self._limit(num_tokens)
        if arriving.has_blocks:
            self._allocate(arriving, limit)
        else:
            self._check_seat()  # it waited when it was exported
            arriving.request.status = RequestStatus.PREEMPTED
            self._allocate(arriving, limit)
            arriving.has_blocks = True
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        return self._tables.by_place(block_ids, arriving.hit_tokens)

    def commit(self, request_id: str, tail: Progress, generator: bytes | None) -> None:
        """Run the request from here on; the blocks hold `tail.num_computed_tokens` tokens."""
        arriving = self._known(request_id)
        scheduler, request = self._scheduler, arriving.request
        computed = tail.num_computed_tokens
        self._append(request, tail.output_token_ids)
        self._take_over(request, tail)
        self._check_room(request_id, computed)
        if not computed and arriving.has_blocks:
            scheduler.kv_cache_manager.free(request)  # it will be admitted like any other
        elif computed:
            self._tidy(request, computed)
        del self._arriving[request_id]
        self._enter(request, computed)
        try:
            if computed:
                scheduler.kv_cache_manager.cache_blocks(request, computed)
            self._start(request, generator)
        except Exception:
            scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            raise

    def assign(self, request_id: str, client_index: int) -> None:
        """The request's outputs go to this client of the engine."""
        self._known(request_id).request.client_index = client_index

    def cancel(self, request_id: str) -> None:
        """Free a reservation. Unknown ids are ignored."""
        arriving = self._arriving.pop(request_id, None)
        if arriving is not None and arriving.has_blocks:
            self._scheduler.kv_cache_manager.free(arriving.request)

    def reserved(self) -> int:
        """Requests that hold a reservation now."""
        return len(self._arriving)

    def to_come(self) -> int:
        """Arriving requests that will run."""
        return sum(one.has_blocks for one in self._arriving.values())

    def arriving(self) -> set[str]:
        """Requests that run elsewhere still."""
        return set(self._arriving)

    def is_arriving(self, request_id: str) -> bool:
        """Whether the request runs elsewhere still."""
        return request_id in self._arriving

    def _take_over(self, request: Request, tail: Progress) -> None:
        request.prefill_stats = _prefill_stats(request, tail)
        now = time.monotonic()
        request.events = [
            EngineCoreEvent.new_event(EngineCoreEventType(kind), now - age)
            for kind, age in tail.events
        ]
        request.spec_token_ids = tail.draft_token_ids[: self._scheduler.num_spec_tokens]

    def _append(self, request: Request, token_ids: Sequence[int]) -> None:
        manager = self._core.structured_output_manager
        for token in token_ids:
            request.append_output_token_ids(token)
            if request.use_structured_output and not manager.accept_tokens(request, [token]):
                raise MigrationRefused("error", f"the grammar refuses token {token}")

    def _check_seat(self) -> None:
        running = len(self._scheduler.running)
        if running >= self._scheduler.max_num_active_reqs:  # without those to come
            raise MigrationRefused("no_batch_slot", f"{running} requests run")

    def _check_room(self, request_id: str, computed: int) -> None:
        if computed and not self._arriving[request_id].has_blocks:
            raise MigrationRefused("no_blocks", f"{computed} tokens were never reserved")
        for manager in self._managers:
            held = len(manager.req_to_blocks.get(request_id, ())) * manager.block_size
            if computed > held and not isinstance(manager, MambaManager):
                raise MigrationRefused("no_blocks", f"{computed} tokens were never reserved")

    def _enter(self, request: Request, computed: int) -> None:
        """The scheduler knows the request from here on."""
        scheduler, request_id = self._scheduler, request.request_id
        # A pending notice of an earlier stay would delete the state that starts now.
        scheduler.finished_req_ids.discard(request_id)
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
        request.num_computed_tokens = computed
        scheduler.requests[request_id] = request

    def _start(self, request: Request, generator: bytes | None) -> None:
        scheduler = self._scheduler
        if request.num_computed_tokens == 0 and request.num_output_tokens == 0:
            request.status = (
                RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
                if request.use_structured_output
                else RequestStatus.WAITING
            )
            scheduler._enqueue_waiting_request(request)
            return
        request.status = RequestStatus.PREEMPTED
        if runner.uses_v2(self._core):
            scheduler._enqueue_waiting_request(request)
            return
        block_ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        runner.register(self._core, request, block_ids, generator)
        if request.num_computed_tokens == 0:
            scheduler._enqueue_waiting_request(request)
            return
        lora.check_slot(scheduler, request)
        # Straight into the batch, in front: behind a long prefill that takes the whole
        # token budget of each step, a resumed request would wait for its end.
        request.status = RequestStatus.RUNNING
        if request.num_computed_tokens < request.num_prompt_tokens:
            scheduler._inflight_prefills.add(request)
        scheduler.running.insert(0, request)

    def _take_blocks(self, arriving: Arriving) -> None:
        request, computed = arriving.request, arriving.exported.num_computed_tokens
        blocks, hit_tokens, _ = self._scheduler.kv_cache_manager.get_computed_blocks(request)
        # A hit beyond what the source has computed (its prefill runs still) is of no use, nor is
        # one that ends within a block.
        hit_tokens -= hit_tokens % self._scheduler.block_size
        if hit_tokens > computed:
            hit_tokens = 0
        self._allocate(arriving, self._limit(request.num_tokens), self._hit(blocks, hit_tokens))
        arriving.has_blocks, arriving.hit_tokens = True, hit_tokens

    def _hit(self, found: KVCacheBlocks, tokens: int) -> tuple[KVCacheBlocks, int]:
        """The blocks of so many tokens; states are left out: the source's own comes."""
        manager = self._scheduler.kv_cache_manager
        if not tokens:
            return manager.empty_kv_cache_blocks, 0
        if not self._tables.plain:
            kept = [
                [] if isinstance(one, MambaManager) else list(blocks[: tokens // one.block_size])
                for one, blocks in zip(self._managers, found.blocks, strict=True)
            ]
            found = manager.create_kv_cache_blocks(tuple(kept))
        return found, tokens

    def _allocate(
        self, arriving: Arriving, limit: int, hit: tuple[KVCacheBlocks, int] | None = None
    ) -> None:
        """Hold blocks for `limit` tokens; what the source has computed is taken as computed."""
        manager, request = self._scheduler.kv_cache_manager, arriving.request
        computed = arriving.exported.num_computed_tokens
        recorded = [len(one.new_block_ids) for one in self._managers]
        if arriving.has_blocks:
            grown = manager.allocate_slots(request, limit, delay_cache_blocks=True)
        else:
            blocks, hit_tokens = hit or (manager.empty_kv_cache_blocks, 0)
            grown = manager.allocate_slots(
                request,
                limit - computed,
                num_new_computed_tokens=hit_tokens,
                new_computed_blocks=blocks,
                num_external_computed_tokens=computed - hit_tokens,
                delay_cache_blocks=True,
            )
        for one, count in zip(self._managers, recorded, strict=True):
            del one.new_block_ids[count:]  # the next step would zero what comes from the source
        if grown is None:
            if not arriving.has_blocks:
                manager.free(request)
            raise MigrationRefused("no_blocks", f"no room for {limit} tokens")

    def _tidy(self, request: Request, computed: int) -> None:
        """Keep the blocks that a request with so many computed tokens has, as vLLM keeps them."""
        scheduler, request_id = self._scheduler, request.request_id
        pool = scheduler.kv_cache_manager.block_pool
        for manager in self._managers:
            if not isinstance(manager, MambaManager):
                manager.remove_skipped_blocks(request_id, computed, request.num_prompt_tokens)
                if manager.records_new_block_ids:
                    unwritten = manager.req_to_blocks[request_id][
                        -(-computed // manager.block_size) :
                    ]
                    manager.new_block_ids += [block.block_id for block in unwritten]
                continue
            held = [one for one in manager.pop_blocks_for_free(request_id) if not one.is_null]
            pool.free_blocks(reversed(held[1:]))
            before = (computed - 1) // manager.block_size
            manager.req_to_blocks[request_id] = [*[pool.null_block] * before, held[0]]
            manager.num_cached_block[request_id] = before

    def _limit(self, num_tokens: int) -> int:
        return min(num_tokens + self._tables.spare_tokens, self._scheduler.max_model_len)

    @property
    def _managers(self) -> tuple[SingleTypeKVCacheManager, ...]:
        """One a block table."""
        return tuple(self._scheduler.kv_cache_manager.coordinator.single_type_managers)

    def _known(self, request_id: str) -> Arriving:
        arriving = self._arriving.get(request_id)
        if arriving is None:
            raise MigrationRefused("unknown_request", f"{request_id} has no reservation here")
        return arriving


def _prefill_stats(request: Request, tail: Progress) -> PrefillStats | None:
    """What vLLM reports with the first token; None once it was reported."""
    if tail.prefilled:
        return None
    stats = PrefillStats()
    if tail.num_computed_tokens:
        stats.set(request.num_prompt_tokens, tail.cached_tokens, 0)
    return stats
