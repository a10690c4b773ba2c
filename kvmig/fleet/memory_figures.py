"""What processes of instances were measured to take apart from weights and KV cache. Pure.

Weights and KV cache follow from a model's files and flags; the rest (libraries, working memory of a
step, compiled graphs) shows only once an instance runs. What one has shown counts for all models
that are like it on the same device under the same engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

import msgspec

Part = Literal["host", "gpu"]


class MemoryShape(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how much that is."""

    engine: str
    """The engine's name, with its version."""
    device: str
    """cpu, or the name of the GPU."""
    part: Part
    """host: each process of an instance in the host's memory; gpu: each worker on its GPU."""
    family: str
    """The model's architecture."""
    eager: bool = False
    """Whether nothing is compiled."""
    weights: int
    """Bytes of a worker's weights."""
    kinds: tuple[str, ...] = ()
    """Kinds of the layers that keep something of a request, by the engine's names."""
    vocabulary: int = 0
    """Entries of the vocabulary; 0: not known."""


class MeasuredRest(msgspec.Struct, frozen=True, kw_only=True):
    """The most that an instance of this shape has taken."""

    shape: MemoryShape
    rest: int
    """Bytes."""
    model: str
    """Name of the model that has shown it."""
    at: float
    """Unix time."""

    @property
    def basis(self) -> str:
        """The origin of the figure, for people."""
        day = datetime.fromtimestamp(self.at, UTC).date()
        return f"measured on {day} with {self.model}"


ASSUMED = "assumed"
"""Basis of a figure that nothing has shown."""


class MemoryFigures:
    """The figures of all shapes that were measured."""

    def __init__(self, found: Iterable[MeasuredRest] = ()) -> None:
        self._by_shape = {one.shape: one for one in found}
        self._new: dict[MemoryShape, MeasuredRest] = {}

    def recall(self, found: Iterable[MeasuredRest]) -> None:
        """Take what an earlier server knew."""
        self._by_shape |= {one.shape: one for one in found}

    def take_new(self) -> list[MeasuredRest]:
        """What was learned since the last call."""
        found, self._new = list(self._new.values()), {}
        return found

    def learn(self, found: MeasuredRest) -> bool:
        """Take a figure; whether it is more than was known of its shape."""
        known = self._by_shape.get(found.shape)
        if known is not None and found.rest <= known.rest:
            return False
        self._by_shape[found.shape] = self._new[found.shape] = found
        return True

    def nearest(self, shape: MemoryShape) -> MeasuredRest | None:
        """The figure of the most similar instance; None: none has run under that engine there.

        For an architecture that has not run the one counts that is most like it: by the kinds of
        its layers, since those with a state of their own take more while they read a prompt; then
        by the vocabulary, which the tokenizer and the last layer hold once more. Of several alike
        the most counts.
        """
        alike = [
            one
            for one in self._by_shape.values()
            if (one.shape.engine, one.shape.device, one.shape.part)
            == (shape.engine, shape.device, shape.part)
        ]
        alike = [one for one in alike if one.shape.eager == shape.eager] or alike
        if family := [one for one in alike if one.shape.family == shape.family]:
            return min(family, key=lambda one: _distance(one.shape.weights, shape.weights))
        return max(alike, key=lambda one: _likeness(one, shape), default=None)

    def typical(self, shape: MemoryShape) -> MeasuredRest | None:
        """The figure of its architecture, or the one in the middle of all others under that engine
        there; None: none has run.

        For what is left where a rule has the part in which architectures differ.
        """
        alike = [
            one
            for one in self._by_shape.values()
            if (one.shape.engine, one.shape.device, one.shape.part, one.shape.eager)
            == (shape.engine, shape.device, shape.part, shape.eager)
        ]
        if any(one.shape.family == shape.family for one in alike):
            return self.nearest(shape)
        alike.sort(key=lambda one: one.rest)
        return alike[len(alike) // 2] if alike else None


def _likeness(one: MeasuredRest, shape: MemoryShape) -> tuple[float, float, int]:
    """Greater for an instance that is more like a model of this shape."""
    ours, theirs = set(shape.kinds), set(one.shape.kinds)
    same = len(ours & theirs) / max(1, len(ours | theirs))
    return same, -_distance(one.shape.vocabulary, shape.vocabulary), one.rest


def _distance(one: int, other: int) -> float:
    return abs(math.log(max(one, 1)) - math.log(max(other, 1)))
