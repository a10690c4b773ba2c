"""The two ends of a migration, on the engine's thread between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation.continuous_batching.requests import RequestState as State
from transformers.generation.continuous_batching.requests import RequestStatus

from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.engines.base import RequestExport, RequestTail, StagedBlocks
from kvmig.engines.transformers.payload import RequestProgress, SubmittedRequest, encode
from kvmig.engines.transformers.requests import (
    HeldRequest,
    SchedulerRequests,
    all_tokens,
    make_state,
)


@dataclass
class TransformersLeaving:
    """A request whose export was taken."""

    state: State
    exported_tokens: int


class TransformersSource:
    """Exports, stages, suspends and gives up requests of one engine."""

    def __init__(self, requests: SchedulerRequests) -> None:
        self._requests = requests
        self._blocks = requests.blocks
        self._leaving: dict[str, TransformersLeaving] = {}

    def export(self, request_id: str) -> RequestExport:
        """Describe the request as it is now."""
        state = self._requests.state(request_id)
        if state is None:
            raise RequestGone("unknown_request", f"request {request_id} is not here")
        self._forget(request_id)
        held, tokens = self._requests.held(request_id), all_tokens(state)
        self._leaving[request_id] = TransformersLeaving(state, len(tokens))
        progress = RequestProgress(tokens[held.num_prompt_tokens :], state.current_len())
        return RequestExport(request_id, len(tokens), [encode(progress), encode(held.submitted)])

    def stage(self, request_id: str, sent: int) -> StagedBlocks:
        """The full blocks after the first `sent`: no step writes them any more."""
        state, held = self._checked(request_id).state, self._blocks.blocks_of(request_id)
        full = state.current_len() // self._blocks.tokens
        return StagedBlocks(
            held[sent:full],
            len(all_tokens(state)) if held else 0,
            state.status == RequestStatus.DECODING,
        )

    def suspend(self, request_id: str, sent: int) -> RequestTail:
        """Take the request out of the scheduler; its rest."""
        leaving = self._checked(request_id)
        if not self._requests.held(request_id).suspended:
            self._requests.suspend(request_id)
        return self._tail(request_id, leaving, sent)

    def resume(self, request_id: str) -> None:
        """Put a suspended request back; forget the export."""
        self._forget(request_id)
        if request_id in self._requests:
            self._requests.resume(request_id)

    def release(self, request_id: str) -> None:
        """Forget a suspended request, which runs elsewhere now."""
        self._forget(request_id)
        if request_id in self._requests and self._requests.held(request_id).suspended:
            self._requests.drop([request_id])

    def _tail(self, request_id: str, leaving: TransformersLeaving, sent: int) -> RequestTail:
        tokens, computed = all_tokens(leaving.state), leaving.state.current_len()
        used = self._blocks.needed(computed)
        return RequestTail(
            self._blocks.blocks_of(request_id)[sent:used],
            len(tokens),
            len(tokens) - self._requests.held(request_id).num_prompt_tokens,
            encode(RequestProgress(tokens[leaving.exported_tokens :], computed)),
        )

    def _forget(self, request_id: str) -> None:
        self._leaving.pop(request_id, None)

    def _checked(self, request_id: str) -> TransformersLeaving:
        """The post-check: exported, still alive, and not preempted since."""
        leaving = self._leaving.get(request_id)
        if leaving is None:
            raise RequestGone("unknown_request", f"request {request_id} was not exported")
        state = self._requests.state(request_id)
        if state is not leaving.state:
            self._forget(request_id)
            reason = "finished" if state is None else "preempted"
            raise RequestGone(reason, f"request {request_id} was {reason} at the source")
        return leaving


@dataclass
class TransformersArriving:
    """A request that is elsewhere still; one that runs there holds blocks here."""

    submitted: SubmittedRequest
    exported: RequestProgress
    client: int = 0

    @property
    def known_tokens(self) -> list[int]:
        """Prompt and outputs of the export."""
        return [*self.submitted.prompt_token_ids, *self.exported.output_token_ids]


class TransformersDestination:
    """Reserves blocks for requests of other engines, and runs them after the commit."""

    def __init__(self, requests: SchedulerRequests, max_tokens: int) -> None:
        """max_tokens: of one request, prompt and outputs."""
        self._requests = requests
        self._blocks = requests.blocks
        self._max_tokens = max_tokens
        self._arriving: dict[str, TransformersArriving] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arriving

    def __len__(self) -> int:
        return len(self._arriving)

    def to_come(self) -> int:
        """Arriving requests that will run."""
        return sum(bool(self._blocks.blocks_of(request_id)) for request_id in self._arriving)

    def reserve(
        self, request_id: str, submitted: SubmittedRequest, exported: RequestProgress
    ) -> int:
        """Take blocks for the request; returns how many hold its prefix already."""
        if request_id in self._requests or request_id in self._arriving:
            raise MigrationRefused("already_migrating", f"{request_id} is here already")
        arriving = TransformersArriving(submitted, exported)
        tokens = arriving.known_tokens
        most = len(submitted.prompt_token_ids) + submitted.max_tokens
        if most > self._max_tokens:
            raise MigrationRefused("incompatible", f"{most} tokens are too long")
        computed = exported.num_computed_tokens
        if computed:
            self._check_seat()
            self._check_room(len(tokens))
            # One token more: transformers always leaves the last one to be computed.
            hits = self._blocks.share_prefix(request_id, tokens[: computed + 1])
            try:
                self._blocks.hold(request_id, self._with_spare(len(tokens)))
            except MigrationRefused:
                self._blocks.free(request_id)
                raise
        else:
            hits = 0  # it waits, and it will wait here
        self._arriving[request_id] = arriving
        return hits

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Hold `num_tokens` tokens and one block spare; all block ids in order."""
        self._known(request_id)
        if not self._blocks.blocks_of(request_id):  # it waited when it was exported
            self._check_seat()
            self._check_room(num_tokens)
        self._blocks.hold(request_id, self._with_spare(num_tokens))
        return self._blocks.blocks_of(request_id)

    def commit(self, request_id: str, tail: RequestProgress) -> None:
        """Run the request from here on; the blocks hold `tail.num_computed_tokens` tokens."""
        arriving = self._known(request_id)
        computed = tail.num_computed_tokens
        self._check_holds(request_id, computed)
        outputs = [*arriving.exported.output_token_ids, *tail.output_token_ids]
        if not computed:
            self._blocks.free(request_id)  # it will be admitted like any other
        state = make_state(request_id, arriving.submitted, outputs, computed)
        self._start(request_id, arriving, state)

    def assign(self, request_id: str, client: int) -> None:
        """The request's outputs go to this client."""
        self._known(request_id).client = client

    def cancel(self, request_id: str) -> None:
        """Free a reservation. Unknown ids are ignored."""
        if self._arriving.pop(request_id, None) is not None:
            self._blocks.free(request_id)

    def _start(self, request_id: str, arriving: TransformersArriving, state: State) -> None:
        if state.current_len():
            self._blocks.computed(state)
        del self._arriving[request_id]
        self._requests.add(request_id, HeldRequest(arriving.submitted, arriving.client), state)

    def _check_holds(self, request_id: str, computed: int) -> None:
        if len(self._blocks.blocks_of(request_id)) < self._blocks.needed(computed):
            raise MigrationRefused("no_blocks", f"{computed} tokens were never reserved")

    def _check_seat(self) -> None:
        scheduler = self._requests.scheduler
        taken = len(scheduler.active_requests) + scheduler.elsewhere()
        if taken >= scheduler.max_requests_per_batch:
            raise MigrationRefused("no_batch_slot", f"{taken} requests run, or are about to")

    def _check_room(self, num_tokens: int) -> None:
        """Raise MigrationRefused where the request would squeeze out those that run here."""
        blocks, scheduler = self._blocks, self._requests.scheduler
        if blocks.share is not None and blocks.share.must_wait():
            raise MigrationRefused("no_blocks", "another engine of its pool is short of its own")
        needed, free = blocks.needed(self._with_spare(num_tokens)), blocks.free_now()
        margin = scheduler.safety_margin * blocks.total if scheduler.active_requests else 0
        if free - needed < margin:
            raise MigrationRefused("no_blocks", f"it takes {needed} blocks of {free} free ones")

    def _with_spare(self, num_tokens: int) -> int:
        return min(num_tokens + self._blocks.tokens, self._max_tokens)

    def _known(self, request_id: str) -> TransformersArriving:
        arriving = self._arriving.get(request_id)
        if arriving is None:
            raise MigrationRefused("unknown_request", f"{request_id} has no reservation here")
        return arriving
