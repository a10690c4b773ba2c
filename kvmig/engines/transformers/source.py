"""The source's side, on the engine's thread between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation.continuous_batching.requests import RequestState as State
from transformers.generation.continuous_batching.requests import RequestStatus

from kvmig.engines.base import Export, Stage, Tail
from kvmig.engines.transformers.payload import Progress, encode
from kvmig.engines.transformers.requests import Requests, all_tokens
from kvmig.ground.errors import RequestGone


@dataclass
class Leaving:
    """A request whose export was taken."""

    state: State
    exported_tokens: int


class Source:
    """Exports, stages, suspends and gives up requests of one engine."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._blocks = requests.blocks
        self._leaving: dict[str, Leaving] = {}

    def export(self, request_id: str) -> Export:
        """Where the request is now."""
        state = self._requests.state(request_id)
        if state is None:
            raise RequestGone("unknown_request", f"request {request_id} is not here")
        self._forget(request_id)
        held, tokens = self._requests.held(request_id), all_tokens(state)
        self._leaving[request_id] = Leaving(state, len(tokens))
        progress = Progress(tokens[held.num_prompt_tokens :], state.current_len())
        return Export(request_id, len(tokens), [encode(progress), encode(held.submitted)])

    def stage(self, request_id: str, sent: int) -> Stage:
        """The full blocks after the first `sent`: no step writes them any more."""
        state, held = self._checked(request_id).state, self._blocks.of(request_id)
        full = state.current_len() // self._blocks.tokens
        return Stage(
            held[sent:full],
            len(all_tokens(state)) if held else 0,
            state.status == RequestStatus.DECODING,
        )

    def suspend(self, request_id: str, sent: int) -> Tail:
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
        """It runs elsewhere now."""
        self._forget(request_id)
        if request_id in self._requests and self._requests.held(request_id).suspended:
            self._requests.drop([request_id])

    def _tail(self, request_id: str, leaving: Leaving, sent: int) -> Tail:
        tokens, computed = all_tokens(leaving.state), leaving.state.current_len()
        used = self._blocks.needed(computed)
        return Tail(
            self._blocks.of(request_id)[sent:used],
            len(tokens),
            len(tokens) - self._requests.held(request_id).num_prompt_tokens,
            encode(Progress(tokens[leaving.exported_tokens :], computed)),
        )

    def _forget(self, request_id: str) -> None:
        self._leaving.pop(request_id, None)

    def _checked(self, request_id: str) -> Leaving:
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
