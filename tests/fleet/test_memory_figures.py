"""What was measured of one model counts for those that are like it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.fleet.figure_rows import forget_engines, store_figure, stored_figures
from kvmig.fleet.memory_figures import MeasuredRest, MemoryFigures, MemoryShape
from kvmig.fleet.store import FleetStore

SHAPE = MemoryShape(
    engine="vllm 0.32.0", device="cpu", part="host", family="Llama", eager=True, weights=1000
)


def found(rest: int, model: str = "a", at: float = 0.0, **shape: Any) -> MeasuredRest:
    return MeasuredRest(shape=replace(SHAPE, **shape), rest=rest, model=model, at=at)


def nearest(figures: MemoryFigures, **shape: Any) -> MeasuredRest:
    near = figures.nearest(replace(SHAPE, **shape))
    assert near is not None
    return near


def test_nothing_is_known_before_a_first_start() -> None:
    assert MemoryFigures().nearest(SHAPE) is None


@pytest.mark.parametrize(
    "other", [{"engine": "vllm 0.33.0"}, {"device": "NVIDIA H100"}, {"part": "gpu"}]
)
def test_another_engine_device_or_memory_says_nothing(other: dict[str, Any]) -> None:
    assert MemoryFigures([found(7, **other)]).nearest(SHAPE) is None


def test_the_most_alike_one_counts_and_says_which_it_is_and_of_when() -> None:
    figures = MemoryFigures(
        [
            found(9, "compiled", eager=False),
            found(8, "other", family="Gemma"),
            found(7, "another", family="Mamba"),
            found(3, "large", weights=90_000),
            found(4, "near", at=86_400.0 * 365, weights=1100),
        ]
    )
    near = nearest(figures)
    assert (near.rest, near.basis) == (4, "measured on 1971-01-01 with near")
    assert nearest(figures, family="Qwen").model == "other", "the most that any has taken"
    assert nearest(figures, eager=False).model == "compiled"


def test_a_new_architecture_counts_as_one_with_like_layers_and_a_like_vocabulary() -> None:
    figures = MemoryFigures(
        [
            found(9, "states", kinds=("Full", "Mamba"), vocabulary=2048),
            found(7, "words", kinds=("Full",), vocabulary=128_000),
            found(5, "more", kinds=("Full",), vocabulary=2048, family="Qwen"),
            found(4, "less", kinds=("Full",), vocabulary=2048, family="Gemma"),
        ]
    )
    for kinds, vocabulary, model in (
        (("Mamba",), 128_000, "states"),
        (("Full",), 200_000, "words"),
        (("Full",), 3000, "more"),
        (("Full", "Window"), 3000, "more"),
        ((), 3000, "states"),
    ):
        near = nearest(figures, family="new", kinds=kinds, vocabulary=vocabulary)
        assert near.model == model, (kinds, vocabulary)


def test_the_most_that_one_shape_took_counts_and_only_what_is_new_is_stored() -> None:
    figures = MemoryFigures()
    assert figures.learn(found(5))
    assert not figures.learn(found(4))
    assert figures.learn(found(6, "b"))
    assert figures.take_new() == [found(6, "b")]
    assert figures.take_new() == []
    assert figures.nearest(SHAPE) == found(6, "b")


def test_the_next_server_knows_what_was_measured_of_the_engines_that_are_there(
    store: FleetStore,
) -> None:
    database = store.database
    for one in (
        found(5),
        found(6, kinds=("Full", "Mamba"), vocabulary=2048),
        found(7, weights=2000),
        found(8, engine="vllm 0.31.0"),
    ):
        store_figure(database, one)
    forget_engines(database, ["vllm 0.32.0", "transformers 5"])
    figures = MemoryFigures()
    figures.recall(stored_figures(database))
    assert sorted(one.rest for one in stored_figures(database)) == [6, 7]
    assert figures.nearest(SHAPE) == found(6, kinds=("Full", "Mamba"), vocabulary=2048)
    assert figures.take_new() == []


def test_where_a_rule_has_what_differs_the_one_in_the_middle_counts() -> None:
    figures = MemoryFigures([found(rest, str(rest), family=str(rest)) for rest in (9, 1, 5)])
    for family, model in (("new", "5"), ("9", "9"), ("1", "1")):
        typical = figures.typical(replace(SHAPE, family=family))
        assert typical is not None
        assert typical.model == model
    assert figures.typical(replace(SHAPE, eager=False)) is None
