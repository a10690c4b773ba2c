"""How far a request is, and one whose prompt is being computed."""

from __future__ import annotations

from typing import NamedTuple

from kvmig_tools.sim.request import SimRequest


class Place(NamedTuple):
    """How far a request is."""

    tokens: int
    computed: int
    """Tokens whose KV is there; 0: it waits."""
    decoding: bool


class Prompt:
    """A request whose prompt (and what it generated before a preemption) is being computed."""

    __slots__ = ("blocks", "computed", "request", "step_tokens", "tokens")

    def __init__(self, request: SimRequest, blocks: int) -> None:
        self.request = request
        self.tokens = request.tokens
        self.blocks = blocks
        self.computed = 0
        self.step_tokens = 0
        """Of it in the step that runs."""
