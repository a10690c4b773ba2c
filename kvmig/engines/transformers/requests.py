"""The requests that one engine runs, and the pool of KV blocks that they share.

Everything here runs on the engine's thread between two steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState as State
from transformers.generation.continuous_batching.requests import RequestStatus

from kvmig.core.errors import MigrationRefused
from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines.base import EngineLoad, RequestState
from kvmig.engines.block_copies import BlockPlan as Whole
from kvmig.engines.block_copies import CopyPlan
from kvmig.engines.transformers.headwise import HeadPlan, HeadwiseAllocator
from kvmig.engines.transformers.payload import StepOutput, SubmittedRequest
from kvmig.engines.transformers.pool import PoolShare
from kvmig.engines.transformers.sampling import LogprobRecorder


class CacheBlocks:
    """transformers' paged cache with one group of layers; a block is one run of bytes in it, or as
    if it were (`plan`)."""

    def __init__(self, cache: Any, model_words: str, weights: str) -> None:
        """model_words: what must agree of the model for blocks to be exchanged, besides `weights`,
        which is the identity of these.
        """
        self._cache = cache
        self.share: PoolShare | None = cache.pool if isinstance(cache.pool, PoolShare) else None
        """The engine's share of a pool, where the cache is in one."""
        ((self._name, self._allocator),) = cache.cache_allocators.items()
        allocator = self._allocator
        self.tokens: int = allocator.tokens_per_page
        self.total: int = allocator.num_blocks
        self.most: int = self.total if self.share is None else self.share.floor_blocks
        """Most blocks of one request."""
        stride: int = allocator.bytes_per_block
        words = f"{model_words}\0{cache.dtype}\0{allocator.num_key_value_heads}"
        # Ids count from the tensor's start, where blocks that nobody gets are.
        self.layout = KVLayout(
            (BlockRegion(cache.cache_tensor.data_ptr(), stride, stride),),
            allocator.num_blocks + 2 * allocator.blocks_per_sector,
            self.tokens,
            hashlib.blake2b(words.encode(), digest_size=16).hexdigest(),
            weights=weights,
        )

    def plan(self) -> CopyPlan:
        """How its blocks are copied."""
        if isinstance(self._allocator, HeadwiseAllocator):
            return HeadPlan(self._allocator)
        return Whole(self.layout)

    def needed(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.tokens)

    def free_now(self) -> int:
        """Blocks that a request can have, those included that only keep a prefix."""
        if self.share is not None:
            return self.share.blocks_left()
        allocator, pool = self._allocator, self._cache.pool
        return int(
            pool.num_free_sectors * allocator.blocks_per_sector
            + pool.count_free_blocks(allocator.index)
            + len(allocator.ledger.cached_blocks)
        )

    def blocks_of(self, request_id: str) -> list[int]:
        """The request's block ids, in order."""
        return list(self._allocator.block_table.get(request_id, ()))

    def share_prefix(self, request_id: str, tokens: list[int]) -> int:
        """Give a new request the blocks that hold its prefix already; how many."""
        matched: int = self._cache.search_prefix_match(request_id, tokens)
        return matched // self.tokens

    def hold(self, request_id: str, num_tokens: int) -> None:
        """Extend the request's blocks to hold `num_tokens` tokens.

        Raises MigrationRefused ("no_blocks"), and leaves it what it had.
        """
        state = State(request_id=request_id, initial_tokens=[])
        cache = self._cache
        if cache.can_store_request_tokens(state, num_tokens):
            return
        # As the stock scheduler does when it runs short.
        if cache.evict_cached_blocks():
            cache.pool.try_to_free_sectors()
            if cache.can_store_request_tokens(state, num_tokens):
                return
        raise MigrationRefused("no_blocks", f"no room for {num_tokens} tokens")

    def computed(self, state: State) -> None:
        """The request's blocks came full up to its position: others may share them."""
        full = state.current_len() // self.tokens
        hashed = self._allocator.ledger.block_to_hash
        new = sum(block not in hashed for block in self.blocks_of(state.request_id)[:full])
        if new and self._cache.use_prefix_sharing:
            self._cache.mark_complete_blocks(state, {self._name: new})

    def free(self, request_id: str) -> None:
        """Give back all that it holds; unknown ids are ignored."""
        self._cache.free_blocks(request_id)


@dataclass
class HeldRequest:
    """A request that is here: waiting, running or suspended."""

    submitted: SubmittedRequest
    client: int
    suspended: State | None = None
    """The request's state while it is out of the scheduler."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt as it was submitted."""
        return len(self.submitted.prompt_token_ids)


class SchedulerRequests:
    """Puts requests into transformers' scheduler and takes them out, at any state."""

    def __init__(self, scheduler: Any, blocks: CacheBlocks, logprobs: LogprobRecorder) -> None:
        self.scheduler = scheduler
        self.blocks = blocks
        self._logprobs = logprobs
        self._held: dict[str, HeldRequest] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def held(self, request_id: str) -> HeldRequest:
        """Raises KeyError."""
        return self._held[request_id]

    def state(self, request_id: str) -> State | None:
        """The request's present state, which is another object after a preemption."""
        held = self._held.get(request_id)
        if held is None:
            return None
        scheduler = self.scheduler
        return (
            held.suspended
            or scheduler.active_requests.get(request_id)
            or scheduler.waiting_requests.get(request_id)
        )

    def may_come_back(self) -> int:
        """Suspended ones that hold blocks, and a place in the batch, without the scheduler."""
        return sum(
            held.suspended is not None and held.suspended.status != RequestStatus.PENDING
            for held in self._held.values()
        )

    def add(self, request_id: str, held: HeldRequest, state: State) -> None:
        """Let the scheduler run it: from its blocks on, or as one that waits."""
        self._held[request_id] = held
        if state.status == RequestStatus.PENDING:
            self.scheduler.add_waiting_request(state)
        else:
            self.scheduler.active_requests[request_id] = state

    def suspend(self, request_id: str) -> None:
        """Take a request out of the scheduler, with its blocks."""
        self._held[request_id].suspended = self._take_out(request_id)

    def resume(self, request_id: str) -> None:
        """Back to where it was; one that waited is first in the queue."""
        held = self._held[request_id]
        state, held.suspended = held.suspended, None
        if state is None:
            return
        if state.status == RequestStatus.PENDING:
            self.scheduler.waiting_requests[request_id] = state
            self.scheduler.waiting_requests_order.appendleft(request_id)
        else:
            self.scheduler.active_requests[request_id] = state

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests and free their blocks; unknown ones are ignored."""
        for request_id in request_ids:
            if self._held.pop(request_id, None) is not None:
                self._take_out(request_id)
                self.blocks.free(request_id)
        # The stock scheduler admits nobody after a preemption until a request has finished.
        self.scheduler.block_new_requests = False

    def took(self, batch: Iterable[Any]) -> dict[int, list[StepOutput]]:
        """The outputs of the step that has just ended, by client."""
        outputs: dict[int, list[StepOutput]] = {}
        for future in batch:
            state = future.state
            held = self._held.get(state.request_id)
            if held is None or not future.has_new_token:
                continue
            finished = state.status == RequestStatus.FINISHED
            if finished:
                del self._held[state.request_id]
            token = state.generated_tokens[-1]
            stops, top = token in held.submitted.stop_token_ids, held.submitted.logprobs
            outputs.setdefault(held.client, []).append(
                StepOutput(
                    state.request_id,
                    [token],
                    ("stop" if stops else "length") if finished else "",
                    []
                    if top is None
                    else [self._logprobs.logprob_of(state.request_id, token, top)],
                )
            )
        return outputs

    def _take_out(self, request_id: str) -> State | None:
        scheduler = self.scheduler
        state = scheduler.active_requests.pop(request_id, None)
        if state is None:
            state = scheduler.waiting_requests.pop(request_id, None)
            if state is not None:
                scheduler.waiting_requests_order.remove(request_id)
        return state


def engine_load(requests: SchedulerRequests) -> EngineLoad:
    """Blocks and counts. O(waiting and running requests)."""
    scheduler, blocks = requests.scheduler, requests.blocks
    running = [state for key, state in scheduler.active_requests.items() if key in requests]
    demands = [
        blocks.needed(len(scheduler.waiting_requests[request_id].initial_tokens))
        for request_id in scheduler.waiting_requests_order
    ]
    return EngineLoad(
        total_blocks=blocks.total,
        used_blocks=blocks.total - blocks.free_now(),
        running=len(running),
        waiting=len(demands),
        head_blocks=demands[0] if demands else 0,
        waiting_blocks=sum(demands),
        prefill_blocks=sum(blocks.needed(len(one.remaining_prefill_tokens)) for one in running),
    )


def request_states(
    requests: SchedulerRequests, most_waiting: int | None = None
) -> list[RequestState]:
    """Every request that runs here, then of the queue the first `most_waiting`, in its order."""
    scheduler, blocks = requests.scheduler, requests.blocks
    place = {request_id: at for at, request_id in enumerate(scheduler.waiting_requests_order)}
    states: list[RequestState] = []
    for request_id in requests:
        if most_waiting is not None and place.get(request_id, -1) >= most_waiting:
            continue
        held, state = requests.held(request_id), requests.state(request_id)
        if state is None:
            continue
        tokens, waits = len(all_tokens(state)), request_id in place
        states.append(
            RequestState(
                request_id=request_id,
                state="suspended" if held.suspended else "waiting" if waits else "running",
                tokens=tokens,
                output_tokens=tokens - held.num_prompt_tokens,
                blocks=len(blocks.blocks_of(request_id)),
                priority=0,
                wanted_blocks=blocks.needed(tokens) if waits else 0,
            )
        )
    states.sort(key=lambda one: place.get(one.request_id, -1))
    return states


def all_tokens(state: State) -> list[int]:
    """Prompt and outputs."""
    return [*state.initial_tokens, *state.generated_tokens]


def make_state(
    request_id: str, submitted: SubmittedRequest, outputs: Sequence[int], computed: int = 0
) -> State:
    """The request as transformers' scheduler has it once the KV of `computed` tokens is there.

    With output tokens and no KV it is as after a preemption.
    """
    tokens = [*submitted.prompt_token_ids, *outputs]
    if outputs and computed == len(tokens) - 1:
        return decoding_state(request_id, submitted, outputs, computed)
    state = State(
        initial_tokens=tokens,
        max_new_tokens=submitted.max_tokens - len(outputs),
        **_common(request_id, submitted),
    )
    state.remaining_prefill_tokens = tokens[computed:]
    if computed:
        state.status = RequestStatus.PREFILLING
    state.position_offset = computed
    return state


def decoding_state(
    request_id: str, submitted: SubmittedRequest, outputs: Sequence[int], computed: int
) -> State:
    """The request as one that decodes: its next step computes all that is left, and samples."""
    prompt = submitted.prompt_token_ids
    state = State(
        initial_tokens=list(prompt),
        max_new_tokens=submitted.max_tokens,
        generated_tokens=list(outputs),
        tokens_to_process=[*prompt, *outputs][computed:],
        **_common(request_id, submitted),
    )
    state.remaining_prefill_tokens = []
    state.status = RequestStatus.DECODING
    state.position_offset = computed
    return state


def _common(request_id: str, submitted: SubmittedRequest) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "eos_token_id": submitted.stop_token_ids,
        "logit_processor_kwargs": _sampling(submitted),
    }


def _sampling(submitted: SubmittedRequest) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    if submitted.logprobs is not None:
        wanted["logprobs"] = submitted.logprobs
    if submitted.temperature:
        wanted |= {"temperature": submitted.temperature, "seed": submitted.seed}
        limits = submitted.top_k, submitted.top_p, submitted.min_p
        if limits != (0, 1.0, 0.0):
            wanted["truncation"] = limits
    return wanted
