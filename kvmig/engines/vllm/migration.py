"""The two ends of a migration, on the engine's thread between two steps.

`VllmProgress` is all the state of a request that travels besides its blocks, in a `RequestExport`
and in a `RequestTail`. `VllmSource` gives requests up, `VllmDestination` takes them over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace
from vllm import __version__
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.engines.base import RequestTail, StagedBlocks
from kvmig.engines.vllm import lora, runner
from kvmig.engines.vllm.connectors import why_held
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.movability import check_movable
from kvmig.engines.vllm.offload import CacheOffload
from kvmig.engines.vllm.tables import RequestTables, SentBlocks

Weights = Callable[[], str]
"""The identity of an engine's weights now; on the engine's thread."""


def check_unchanged_weights(began: str, now: str) -> None:
    """Refuse a request, or a session, that began under other weights. Raises MigrationRefused."""
    if began != now:
        raise MigrationRefused("incompatible", "the weights were updated meanwhile")


def check_awake(core: StepCore) -> None:
    """Refuse while the engine is paused or asleep, or is about to be.

    A request would run there where nothing may, or stand still where it needn't; weights may be
    updated meanwhile. Raises MigrationRefused.
    """
    if core.clears:
        raise MigrationRefused("busy", "the engine's caches are about to be cleared")
    if core.is_sleeping():
        raise MigrationRefused("busy", "the engine is paused")


class VllmProgress(msgspec.Struct, frozen=True):
    """How far a request is; with the submitted request, all that its next step depends on."""

    output_token_ids: list[int]
    """Output tokens: all in a `RequestExport`; in a `RequestTail` those after the exported ones."""
    num_computed_tokens: int
    """Tokens whose KV is in the blocks. 0: not started, or preempted."""
    prefilled: bool
    """Whether the first output token was sent (prefill statistics with it)."""
    cached_tokens: int = 0
    """Prompt tokens that the first prefix cache held, for the usage statistics."""
    generator: bytes | None = None
    """State of the seeded torch.Generator (model runner V1; V2 seeds are stateless)."""
    adapter: str = ""
    """Identity of its LoRA adapter; empty without one."""
    draft_token_ids: list[int] = []
    """Drafts of the speculative method for the next step."""
    events: list[tuple[int, float]] = []
    """The times in the queue that its first output will report (`EngineCoreEventType`, seconds
    ago); empty once it was sent. Ages, since each machine has a clock of its own."""
    max_tokens: int = 0
    """Tokens that its engine lets a request have (`--max-model-len`); 0: not known."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(VllmProgress).decode


def token_request(
    request_id: str, prompt: Sequence[int], params: SamplingParams, salt: str | None = None
) -> EngineCoreRequest:
    """A request of tokens alone. salt: requests of other salts share no prefix with it."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params.clone(),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def encode_request(request: EngineCoreRequest) -> list[bytes]:
    """The request as vLLM puts it on its own sockets."""
    return [bytes(frame) for frame in MsgpackEncoder().encode(request)]


def decode_request(frames: list[bytes]) -> EngineCoreRequest:
    """Inverse of `encode_request`; a new object each time."""
    request = MsgpackDecoder(EngineCoreRequest).decode(frames)
    assert isinstance(request, EngineCoreRequest)
    return request


_Fields = msgspec.defstruct(
    "_Fields",
    [(name, msgspec.Raw, msgspec.Raw(b"\xc0")) for name in EngineCoreRequest.__struct_fields__],
    array_like=True,
    forbid_unknown_fields=True,
)
"""The fields of a request as they came, undecoded; the positional ones that we know."""


def check_known(frames: Sequence[bytes]) -> None:
    """Refuse a request with a field that this vLLM doesn't know: decoding would leave it out.

    Another minor has encoded it. Raises MigrationRefused with the field, and msgspec's errors.
    """
    try:
        fields: Any = msgspec.msgpack.decode(frames[0], type=_Fields)
    except msgspec.ValidationError as error:
        why = f"vLLM {__version__} here knows a request by fewer fields: {error}"
        raise MigrationRefused("incompatible", why) from error
    said = msgspec.msgpack.decode(fields.sampling_params, type=dict[str, msgspec.Raw] | None) or {}
    if unknown := sorted(said.keys() - set(SamplingParams.__struct_encode_fields__)):
        why = f"vLLM {__version__} here knows no sampling parameter {', '.join(unknown)}"
        raise MigrationRefused("incompatible", why)


def encode_progress(progress: VllmProgress) -> bytes:
    """msgpack."""
    return _encode(progress)


def decode_progress(data: bytes) -> VllmProgress:
    """Inverse of `encode_progress`; raises msgspec.DecodeError."""
    return _decode(data)


Gather = Callable[[list[int]], list[int]]
"""Copies blocks at once and returns their checksums; none if that isn't wanted."""


@dataclass
class VllmLeaving:
    """A request whose export was taken."""

    request: Request
    num_preemptions: int
    exported_outputs: int
    weights: str
    sent: SentBlocks | None = None
    """Known from the first stage, or the tail, on."""
    suspended: bool = False
    on_drained: Callable[[], None] | None = None


class VllmSource:
    """Exports, stages, suspends and gives up requests of one engine."""

    def __init__(self, core: StepCore, tables: RequestTables, weights: Weights) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._tables = tables
        self._weights = weights
        self._leaving: dict[str, VllmLeaving] = {}

    def export(self, request_id: str, weights: str) -> VllmProgress:
        """Watch the request from now on; how far it is now. weights: those that it began under."""
        check_awake(self._core)
        check_unchanged_weights(weights, self._weights())
        request = self._live(request_id)
        check_movable(request, self._core.vllm_config)
        self._leaving[request_id] = VllmLeaving(
            request, request.num_preemptions, request.num_output_tokens, weights
        )
        return self._progress(request, 0)

    def stage(self, request_id: str, sent: int) -> StagedBlocks:
        """The full blocks after the first `sent`: no step writes them any more."""
        leaving = self._checked(request_id)
        request, known = leaving.request, self._sent(leaving, sent)
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        places, ids = self._tables.full(block_ids, _computed(request), known)
        known.places += places
        decoding = request.status == RequestStatus.RUNNING and not request.is_prefill_chunk
        num_tokens = request.num_tokens if self._tables.count_blocks(block_ids) else 0
        return StagedBlocks(ids, num_tokens, decoding, places)

    def follow_prompt(
        self, request_id: str, sent: int, most_tokens: int, gather: Gather
    ) -> StagedBlocks | Future[RequestTail]:
        """The full blocks after the first `sent`; the tail once the prompt's last chunk is
        computed, or in the step that runs."""
        stage = self.stage(request_id, sent)
        if not stage.decoding or stage.num_tokens > most_tokens:
            return stage
        return self.suspend(request_id, sent, gather)

    def suspend(self, request_id: str, sent: int, gather: Gather) -> Future[RequestTail]:
        """Take the request out of the batch; its tail comes once no step holds it."""
        leaving = self._checked(request_id)
        request, scheduler = leaving.request, self._scheduler
        leaving.suspended = True
        if request.status == RequestStatus.RUNNING:
            scheduler.running.remove(request)
        else:
            _leave_queue(scheduler, request)

        promised: Future[RequestTail] = Future()
        promised.set_running_or_notify_cancel()  # whoever awaits it can't take it back

        def drained() -> None:
            try:
                tail = self._tail(request_id, sent)
                promised.set_result(replace(tail, checksums=gather(tail.block_ids)))
            except Exception as error:  # noqa: BLE001  the migration's alone: the loop goes on
                promised.set_exception(error)

        if request.num_in_flight_tokens == 0:
            drained()
        else:
            leaving.on_drained = drained
        return promised

    def between_steps(self) -> None:
        """Finish suspensions whose last step has returned (async)."""
        for leaving in list(self._leaving.values()):
            request = leaving.request
            if leaving.on_drained and (request.num_in_flight_tokens == 0 or request.is_finished()):
                finish, leaving.on_drained = leaving.on_drained, None
                finish()

    def resume(self, request_id: str) -> None:
        """Put a suspended request back where it was; watch it no more."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is None or not leaving.suspended or leaving.request.is_finished():
            return
        if self._scheduler.requests.get(request_id) is not leaving.request:
            return
        request, scheduler = leaving.request, self._scheduler
        if request.status == RequestStatus.RUNNING:
            self._rejoin(request)
        elif (
            request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            or request.num_computed_tokens  # it waits with its blocks, ahead of those without any
        ):
            scheduler._enqueue_waiting_request(request)
        else:
            scheduler.waiting.prepend_request(request)

    def _rejoin(self, request: Request) -> None:
        if lora.has_slot(self._scheduler, request):
            self._scheduler.running.append(request)
            return
        # Others have taken its adapter's place: it waits for one, with its blocks.
        request.status = RequestStatus.PREEMPTED
        self._scheduler._enqueue_waiting_request(request)
        # Runner V2 has a place for each that runs, and no more: it gives this one up.
        self._scheduler.reset_preempted_req_ids.add(request.request_id)

    def release(self, request_id: str) -> None:
        """Free a suspended request: it runs elsewhere now. No output is emitted for it."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None and leaving.suspended:
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def may_come_back(self) -> int:
        """Suspended requests that were running: `resume` puts them back into the batch."""
        return sum(
            one.suspended and one.request.status == RequestStatus.RUNNING
            for one in self._leaving.values()
        )

    def suspended(self) -> list[Request]:
        """Requests that are out of the batch, or the queue, on our behalf."""
        return [
            one.request
            for one in self._leaving.values()
            if one.suspended and not one.request.is_finished()
        ]

    def _tail(self, request_id: str, sent: int) -> RequestTail:
        leaving = self._checked(request_id)
        request, known = leaving.request, self._sent(leaving, sent)
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        places, ids = self._tables.unsent_blocks(block_ids, _computed(request), known)
        known.places += places
        progress = self._progress(request, leaving.exported_outputs)
        return RequestTail(
            block_ids=ids,
            num_tokens=request.num_tokens,
            num_output_tokens=request.num_output_tokens,
            state=encode_progress(progress),
            places=places,
        )

    def _sent(self, leaving: VllmLeaving, sent: int) -> SentBlocks:
        """The blocks that the destination has; at first those that its prefix cache held."""
        if leaving.sent is None:
            leaving.sent = SentBlocks(sent * self._tables.block_tokens, sent)
        leaving.sent.back_to(sent)
        return leaving.sent

    def _progress(self, request: Request, since: int) -> VllmProgress:
        stats, now = request.prefill_stats, time.monotonic()
        return VllmProgress(
            output_token_ids=list(request.output_token_ids[since:]),
            num_computed_tokens=_computed(request),
            prefilled=stats is None,
            cached_tokens=0 if stats is None else stats.num_cached_tokens,
            generator=runner.generator_state(self._core, request.request_id),
            # Model runner V2 keeps them on the device, and names as many -1.
            draft_token_ids=[token for token in request.spec_token_ids if token >= 0],
            events=[(int(one.type), now - one.timestamp) for one in request.events],
            max_tokens=self._scheduler.max_model_len,
        )

    def _live(self, request_id: str) -> Request:
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            raise RequestGone("finished", f"request {request_id} is not running here any more")
        return request

    def _checked(self, request_id: str) -> VllmLeaving:
        """The post-check: same request, still alive, not preempted since the export, the same
        weights, and an engine that runs."""
        leaving = self._leaving.get(request_id)
        if leaving is None:
            raise RequestGone("unknown_request", f"request {request_id} was not exported")
        try:
            request = self._live(request_id)
        except RequestGone:
            del self._leaving[request_id]
            raise
        if request is not leaving.request or request.num_preemptions != leaving.num_preemptions:
            self.resume(request_id)
            raise RequestGone("preempted", f"request {request_id} was preempted at the source")
        if held := why_held(request, self._core.vllm_config.kv_transfer_config):
            self.resume(request_id)
            raise RequestGone("started", held)
        try:
            check_awake(self._core)
            check_unchanged_weights(leaving.weights, self._weights())
        except MigrationRefused:
            self.resume(request_id)
            raise
        return leaving


def _computed(request: Request) -> int:
    """Tokens whose KV is there, with any steps in flight.

    Of a request that was preempted a step in flight computes tokens that don't count any more.
    """
    return max(0, request.num_computed_tokens - request.num_in_flight_tokens)


def _leave_queue(scheduler: Scheduler, request: Request) -> None:
    scheduler.waiting.remove_requests([request])
    scheduler.kv_holding_waiting.remove_requests([request])
    scheduler.deferred_waiting.discard(request)


@dataclass
class VllmArriving:
    """A request that is still at the other engine; if it runs there, it holds blocks here."""

    request: Request
    exported: VllmProgress
    weights: str
    """The identity of the weights that it began under."""
    has_blocks: bool = False
    hit_tokens: int = 0
    """Tokens whose blocks the prefix cache here held already."""
    unread: set[int] = field(default_factory=set)
    """Blocks of the request that were checked, where vLLM offloads: it may still read others."""


class VllmDestination:
    """Reserves blocks for requests of other engines, and runs them after the commit."""

    def __init__(
        self, core: StepCore, tables: RequestTables, offload: CacheOffload, weights: Weights
    ) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._tables = tables
        self._offload = offload
        self._weights = weights
        self._arriving: dict[str, VllmArriving] = {}

    def reserve(self, request: Request, exported: VllmProgress, weights: str) -> int:
        """Take blocks for the request; returns how many hold its prefix already.

        `request` carries the exported output tokens; it is not in the scheduler yet. weights:
        those of the source.
        """
        scheduler, request_id = self._scheduler, request.request_id
        check_awake(self._core)
        check_unchanged_weights(weights, self._weights())
        if request_id in scheduler.requests or request_id in self._arriving:
            raise MigrationRefused("already_migrating", f"{request_id} is here already")
        _check_end(request, exported.max_tokens, scheduler.max_model_len)
        self._offload.check_left(request_id)
        waits = exported.num_computed_tokens == 0
        if not waits:
            self._check_seat()
        lora.load_adapter(self._core, request)
        self._arriving[request_id] = arriving = VllmArriving(request, exported, weights)
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
        check_awake(self._core)
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

    def commit(
        self,
        request_id: str,
        tail: VllmProgress,
        generator: bytes | None,
        land: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the request from here on; the blocks hold `tail.num_computed_tokens` tokens.

        land: has the last of them in the cache when it returns. The model runners know the request
        before: a copy needn't be over by then.
        """
        check_awake(self._core)
        arriving = self._known(request_id)
        # What has come was computed by those, and goes into the prefix cache here.
        check_unchanged_weights(arriving.weights, self._weights())
        scheduler, request = self._scheduler, arriving.request
        computed = tail.num_computed_tokens
        self._append(request, tail.output_token_ids)
        self._take_over(request, tail)
        self._check_room(request_id, computed)
        if not computed and arriving.has_blocks:
            scheduler.kv_cache_manager.free(request)  # it will be admitted like any other
        elif computed:
            self._tidy(request, computed)
        request.num_computed_tokens = computed
        try:
            self._register(request, generator)
            land()
        except Exception:
            scheduler.finished_req_ids.add(request_id)  # the next step's word to the model runners
            raise
        del self._arriving[request_id]
        self._enter(request)
        try:
            if computed:
                scheduler.kv_cache_manager.cache_blocks(request, computed)
            self._start(request)
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

    def unstarted(self, request_id: str) -> Request | None:
        """The request, if it waited when it was exported, and holds nothing here so far."""
        arriving = self._arriving.get(request_id)
        return None if arriving is None or arriving.has_blocks else arriving.request

    def to_come(self) -> int:
        """Arriving requests that will run."""
        return sum(one.has_blocks for one in self._arriving.values())

    def arriving(self) -> set[str]:
        """Requests that run elsewhere still."""
        return set(self._arriving)

    def is_arriving(self, request_id: str) -> bool:
        """Whether the request runs elsewhere still."""
        return request_id in self._arriving

    def _take_over(self, request: Request, tail: VllmProgress) -> None:
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

    def _register(self, request: Request, generator: bytes | None) -> None:
        """Let the model runners know the request, if it doesn't come to them as a new one."""
        waits = request.num_computed_tokens == 0
        if waits and (request.num_output_tokens == 0 or runner.uses_v2(self._core)):
            return  # V2 hears of those that waited, later
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        runner.register(self._core, request, block_ids, generator)

    def _enter(self, request: Request) -> None:
        """The scheduler knows the request from here on."""
        scheduler, request_id = self._scheduler, request.request_id
        # A pending notice of an earlier stay would delete the state that starts now.
        scheduler.finished_req_ids.discard(request_id)
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
        scheduler.requests[request_id] = request
        self._offload.entered(request)

    def _start(self, request: Request) -> None:
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
        if request.num_computed_tokens == 0:
            request.num_preemptions = 1  # else it is a new one, once blocks came from the host
            scheduler._enqueue_waiting_request(request)
            return
        lora.check_slot(scheduler, request)
        # Straight into the batch, in front: behind a long prefill that takes the whole
        # token budget of each step, a resumed request would wait for its end.
        request.status = RequestStatus.RUNNING
        if request.num_computed_tokens < request.num_prompt_tokens:
            scheduler._inflight_prefills.add(request)
            request.is_prefill_chunk = True  # else a step that computes no prompts would take it
        scheduler.running.insert(0, request)

    def _take_blocks(self, arriving: VllmArriving) -> None:
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
        """The blocks of `tokens` tokens; states are left out: the source's own comes."""
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
        self, arriving: VllmArriving, limit: int, hit: tuple[KVCacheBlocks, int] | None = None
    ) -> None:
        """Hold blocks for `limit` tokens; what the source has computed is taken as computed."""
        manager, request = self._scheduler.kv_cache_manager, arriving.request
        computed = arriving.exported.num_computed_tokens
        recorded = [len(one.new_block_ids) for one in self._managers]
        if arriving.has_blocks:
            grown = manager.allocate_slots(request, limit, delay_cache_blocks=True)
        else:
            blocks, hit_tokens = hit or (manager.empty_kv_cache_blocks, 0)
            arriving.unread = set().union(*blocks.get_block_ids())
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
        now = self._offload.blocks_of(request)
        try:
            self._offload.check_unread(now - arriving.unread)
        except MigrationRefused:
            if not arriving.has_blocks:
                manager.free(request)
            raise
        arriving.unread = now

    def _tidy(self, request: Request, computed: int) -> None:
        """Keep the blocks of a request's computed tokens, as vLLM keeps them."""
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
            if manager.mamba_cache_mode == "align":
                # As of a request that runs: workers know its blocks, and only hear of further ones.
                manager._allocated_block_reqs.add(request_id)

    def _limit(self, num_tokens: int) -> int:
        return min(num_tokens + self._tables.spare_tokens, self._scheduler.max_model_len)

    @property
    def _managers(self) -> tuple[SingleTypeKVCacheManager, ...]:
        """vLLM's manager of each block table."""
        return tuple(self._scheduler.kv_cache_manager.coordinator.single_type_managers)

    def _known(self, request_id: str) -> VllmArriving:
        arriving = self._arriving.get(request_id)
        if arriving is None:
            raise MigrationRefused("unknown_request", f"{request_id} has no reservation here")
        return arriving


def _check_end(request: Request, there: int, here: int) -> None:
    """Refuse a request that would end earlier here than there, or later.

    there, here: tokens of a request at most. Raises MigrationRefused.
    """
    if request.num_tokens > here:
        raise MigrationRefused("incompatible", f"{request.num_tokens} tokens are too long")
    wants = request.num_prompt_tokens + request.max_tokens
    if there and min(wants, there) != min(wants, here):
        why = f"it may have {min(wants, there)} tokens there, {min(wants, here)} here"
        raise MigrationRefused("incompatible", f"{why} (--max-model-len)")


def _prefill_stats(request: Request, tail: VllmProgress) -> PrefillStats | None:
    """The prefill statistics that vLLM reports with the first token; None once it has."""
    if tail.prefilled:
        return None
    stats = PrefillStats()
    if tail.num_computed_tokens:
        stats.set(request.num_prompt_tokens, tail.cached_tokens, 0)
    return stats
