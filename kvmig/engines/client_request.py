"""What an engine's front half hands to a front end's router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmig.engines.base import Frames

PromptMarks = Callable[[], Sequence[int]]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A new request: one sequence of a client's call."""

    request_id: str
    external_id: str
    """The engine's id of the client's request; several sequences may share it."""
    prompt_tokens: int
    priority: int
    payload: Frames
    """The request in the engine's own encoding."""
    most_tokens: int | None = None
    """Bound of its output tokens; None: it isn't known."""
    whole: bool = False
    """Whether its client gets no token before the last."""
    logprobs: int = 0
    """Log-probabilities that come with each of its tokens."""
    prompt_logprobs: int = 0
    """Log-probabilities that come with its prompt."""
    numbers: int = 0
    """Numbers of its embedding."""
    marks: PromptMarks | None = None
    """Computes the marks of its prompt (`kvmig.core.prefix_marks`); None: it has none."""
