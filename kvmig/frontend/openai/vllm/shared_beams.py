"""Beams of vLLM's search, which share what they have in common.

vLLM gives each beam lists of its own, with the whole prompt in one of them, and keeps each beam
that might have ended with a step. So a search of 10 beams over a prompt of 100,000 tokens, in which
each beam might end with each token, would keep 8 MB more with every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.entrypoints.generate.beam_search.utils import BeamSearchSequence

Item = TypeVar("Item")


class SharedList(Sequence[Item]):
    """A list that stays as it is: `+` makes a longer one, which has this one as its beginning."""

    __slots__ = ("_before", "_last", "_size", "_start")

    def __init__(self, start: list[Item]) -> None:
        self._start = start
        self._before: SharedList[Item] | None = None
        self._last: Any = start[-1] if start else None
        self._size = len(start)

    def __add__(self, more: Iterable[Item]) -> SharedList[Item]:
        found = self
        for item in more:
            longer = SharedList(self._start)
            longer._before, longer._last, longer._size = found, item, found._size + 1
            found = longer
        return found

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: Any) -> Any:
        if at == -1 and self._size:
            return self._last
        return self.to_list()[at]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.to_list())

    def to_list(self) -> list[Item]:
        """A copy of all of it."""
        added: list[Item] = []
        one: SharedList[Item] = self
        while one._before is not None:
            added.append(one._last)
            one = one._before
        return [*one._start, *reversed(added)]


@dataclass
class SharedBeam(BeamSearchSequence):
    """vLLM's, whose tokens and log-probabilities are shared with the beams that it came from."""

    def __post_init__(self) -> None:
        self.tokens: Any = _shared(self.tokens)
        self.logprobs: Any = _shared(self.logprobs)

    def get_prompt(self) -> Any:
        """The prompt of its next step, with a list of its own."""
        return BeamSearchSequence(self.orig_prompt, self.tokens.to_list(), []).get_prompt()


def _shared(items: Any) -> SharedList[Any]:
    return items if isinstance(items, SharedList) else SharedList(items)
