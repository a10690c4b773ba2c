"""The requests that one engine runs, on its thread between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState as State
from transformers.generation.continuous_batching.requests import RequestStatus

from kvmig.engines.transformers.blocks import Blocks
from kvmig.engines.transformers.logprobs import Logprobs
from kvmig.engines.transformers.payload import Output, Submitted


@dataclass
class Held:
    """A request that is here: waiting, running or suspended."""

    submitted: Submitted
    client: int
    suspended: State | None = None
    """Its state while it is out of the scheduler."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt as it was submitted."""
        return len(self.submitted.prompt_token_ids)


class Requests:
    """Puts requests into transformers' scheduler and takes them out, at any state."""

    def __init__(self, scheduler: Any, blocks: Blocks, logprobs: Logprobs) -> None:
        self.scheduler = scheduler
        self.blocks = blocks
        self._logprobs = logprobs
        self._held: dict[str, Held] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def held(self, request_id: str) -> Held:
        """Raises KeyError."""
        return self._held[request_id]

    def state(self, request_id: str) -> State | None:
        """Its present state, which is another object after it was preempted."""
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

    def add(self, request_id: str, held: Held, state: State) -> None:
        """Let the scheduler run it: from its blocks on, or as one that waits."""
        self._held[request_id] = held
        if state.status == RequestStatus.PENDING:
            self.scheduler.add_waiting_request(state)
        else:
            self.scheduler.active_requests[request_id] = state

    def suspend(self, request_id: str) -> None:
        """Out of the scheduler, with its blocks."""
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
        """Forget them and free their blocks; those not here are ignored."""
        for request_id in request_ids:
            if self._held.pop(request_id, None) is not None:
                self._take_out(request_id)
                self.blocks.free(request_id)
        # The stock scheduler admits nobody after a preemption until a request has finished.
        self.scheduler.block_new_requests = False

    def took(self, batch: Iterable[Any]) -> dict[int, list[Output]]:
        """What the step that has just ended gave each client's requests."""
        outputs: dict[int, list[Output]] = {}
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
                Output(
                    state.request_id,
                    [token],
                    ("stop" if stops else "length") if finished else "",
                    [] if top is None else [self._logprobs.of(state.request_id, token, top)],
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


def all_tokens(state: State) -> list[int]:
    """Prompt and outputs."""
    return [*state.initial_tokens, *state.generated_tokens]


def make_state(
    request_id: str, submitted: Submitted, outputs: Sequence[int], computed: int = 0
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
    request_id: str, submitted: Submitted, outputs: Sequence[int], computed: int
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


def _common(request_id: str, submitted: Submitted) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "eos_token_id": submitted.stop_token_ids,
        "logit_processor_kwargs": _sampling(submitted),
    }


def _sampling(submitted: Submitted) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    if submitted.logprobs is not None:
        wanted["logprobs"] = submitted.logprobs
    if submitted.temperature:
        wanted |= {"temperature": submitted.temperature, "seed": submitted.seed}
        limits = submitted.top_k, submitted.top_p, submitted.min_p
        if limits != (0, 1.0, 0.0):
            wanted["truncation"] = limits
    return wanted
