"""The destination's side, on the engine's thread between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation.continuous_batching.requests import RequestState as State

from kvmig.engines.transformers.payload import Progress, Submitted
from kvmig.engines.transformers.requests import Held, Requests, make_state
from kvmig.ground.errors import MigrationRefused


@dataclass
class Arriving:
    """A request that is elsewhere still; one that runs there holds blocks here."""

    submitted: Submitted
    exported: Progress
    client: int = 0

    @property
    def known_tokens(self) -> list[int]:
        """Prompt and outputs of the export."""
        return [*self.submitted.prompt_token_ids, *self.exported.output_token_ids]


class Destination:
    """Reserves blocks for requests of other engines, and runs them after the commit."""

    def __init__(self, requests: Requests, max_tokens: int) -> None:
        """max_tokens: of one request, prompt and outputs."""
        self._requests = requests
        self._blocks = requests.blocks
        self._max_tokens = max_tokens
        self._arriving: dict[str, Arriving] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arriving

    def __len__(self) -> int:
        return len(self._arriving)

    def to_come(self) -> int:
        """Arriving requests that will run."""
        return sum(bool(self._blocks.of(request_id)) for request_id in self._arriving)

    def reserve(self, request_id: str, submitted: Submitted, exported: Progress) -> int:
        """Take blocks for the request; returns how many hold its prefix already."""
        if request_id in self._requests or request_id in self._arriving:
            raise MigrationRefused("already_migrating", f"{request_id} is here already")
        arriving = Arriving(submitted, exported)
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
        if not self._blocks.of(request_id):  # it waited when it was exported
            self._check_seat()
            self._check_room(num_tokens)
        self._blocks.hold(request_id, self._with_spare(num_tokens))
        return self._blocks.of(request_id)

    def commit(self, request_id: str, tail: Progress) -> None:
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

    def _start(self, request_id: str, arriving: Arriving, state: State) -> None:
        if state.current_len():
            self._blocks.computed(state)
        del self._arriving[request_id]
        self._requests.add(request_id, Held(arriving.submitted, arriving.client), state)

    def _check_holds(self, request_id: str, computed: int) -> None:
        if len(self._blocks.of(request_id)) < self._blocks.needed(computed):
            raise MigrationRefused("no_blocks", f"{computed} tokens were never reserved")

    def _check_seat(self) -> None:
        scheduler = self._requests.scheduler
        taken = len(scheduler.active_requests) + scheduler.elsewhere()
        if taken >= scheduler.max_requests_per_batch:
            raise MigrationRefused("no_batch_slot", f"{taken} requests run, or are about to")

    def _check_room(self, num_tokens: int) -> None:
        """It must not squeeze out those who run here."""
        blocks, scheduler = self._blocks, self._requests.scheduler
        needed, free = blocks.needed(self._with_spare(num_tokens)), blocks.free_now()
        margin = scheduler.safety_margin * blocks.total if scheduler.active_requests else 0
        if free - needed < margin:
            raise MigrationRefused("no_blocks", f"it takes {needed} blocks of {free} free ones")

    def _with_spare(self, num_tokens: int) -> int:
        return min(num_tokens + self._blocks.tokens, self._max_tokens)

    def _known(self, request_id: str) -> Arriving:
        arriving = self._arriving.get(request_id)
        if arriving is None:
            raise MigrationRefused("unknown_request", f"{request_id} has no reservation here")
        return arriving
