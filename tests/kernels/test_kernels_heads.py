"""Head-wise blocks: the C++ library does what NumPy does, whatever is taken and given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmig.core.errors import KernelUnavailable
from kvmig.kernels import abi, heads, native
from kvmig.kernels.heads import HeadUnits, NativeHeads, ReferenceHeads

ROOT = Path(__file__).parents[2]
Kind = Callable[[NDArray[np.int64]], HeadUnits]
KINDS: list[Kind] = [NativeHeads, ReferenceHeads]


def units(*ids: int) -> NDArray[np.int64]:
    return np.array(ids, np.int64)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_both_take_and_give_the_same_units(steps: list[tuple[bool, int]]) -> None:
    native, reference = (kind(np.arange(2, 22)) for kind in KINDS)
    held: list[NDArray[np.int64]] = []
    for takes, n in steps:
        if takes and n <= native.free:
            one, other = native.take_units(n), reference.take_units(n)
            assert one.tolist() == other.tolist()
            held.append(one)
        elif held:
            back = held.pop(n % len(held))
            native.give_units(back)
            reference.give_units(back)
        mine = [unit for some in held for unit in some.tolist()]
        assert len(set(mine)) == len(mine)
        assert native.free == reference.free == 20 - len(mine)


@given(st.data())
def test_both_find_the_same_rows(data: st.DataObject) -> None:
    blocks, layers, n_heads, tokens = (data.draw(st.integers(1, 5)) for _ in range(4))
    table = np.random.default_rng(0).permutation(blocks * layers * n_heads)
    table = table.reshape(blocks, -1).astype(np.int64)
    index = units(*data.draw(st.lists(st.integers(0, blocks * tokens - 1), max_size=20)))
    first = data.draw(st.integers(0, layers - 1)) * n_heads
    one, other = (kind(units(0)).rows(table, tokens, index, first, n_heads) for kind in KINDS)
    assert one.shape == (len(index), n_heads)
    assert np.array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_that_of_the_tokens_place_in_its_unit(kind: Kind) -> None:
    table = units(7, 3, 5, 4).reshape(2, 2)
    rows = kind(units(0)).rows(table, 16, units(16 + 2), 1, 1)
    assert rows.tolist() == [[4 * 32 + 2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [(5, 5), (5, 9), (9,), (-1,), (5, 1)])
def test_units_that_nobody_holds_can_not_be_given_and_nothing_changes(
    kind: Kind, back: tuple[int, ...]
) -> None:
    made = kind(units(1, 4, 5))
    assert made.take_units(1).tolist() == [5]
    with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
        made.give_units(units(*back))
    assert made.free == 2
    made.give_units(units(5))
    assert made.take_units(3).tolist() == [5, 4, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [4, -1])
def test_more_units_than_are_free_can_not_be_taken(kind: Kind, n: int) -> None:
    made = kind(units(1, 4, 5))
    with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
        made.take_units(n)
    assert made.free == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("index", "first", "n_heads"), [(8, 0, 1), (-1, 0, 1), (0, 2, 1), (0, -1, 1)]
)
def test_rows_outside_the_table_are_refused(
    kind: Kind, index: int, first: int, n_heads: int
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
        kind(units(0)).rows(np.zeros((2, 2), np.int64), 4, units(index), first, n_heads)


def test_every_function_of_the_header_is_declared() -> None:
    header = (ROOT / "csrc" / "heads.h").read_text()
    named = set(re.findall(r"^int (kvmig_\w+)\(", header, re.MULTILINE))
    assert named == set(abi.CPU_PROTOTYPES)


def test_without_a_library_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise KernelUnavailable("no compiler")

    monkeypatch.setattr(native, "library", missing)
    assert isinstance(heads.heads(units(1)), ReferenceHeads)
