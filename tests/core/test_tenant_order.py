"""Whose entry goes first: kvmig.core.tenant_order."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.tenant_order import TenantOrder


class Model:
    """The same by looking at everything."""

    def __init__(self) -> None:
        self.entries: dict[int, int] = {}
        """Weights, in the order of last use."""

    def use(self, entry: int, weight: int) -> None:
        self.entries.pop(entry, None)
        self.entries[entry] = weight

    def next(self) -> int:
        weights: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, (entry, weight) in enumerate(self.entries.items()):
            weights[entry % 3] = weights.get(entry % 3, 0) + weight
            last[entry % 3] = at
        first = min(weights, key=lambda tenant: (-weights[tenant], last[tenant]))
        return next(entry for entry in self.entries if entry % 3 == first)


@given(
    st.lists(
        st.tuples(st.sampled_from(["use", "remove", "next"]), st.integers(0, 11), st.integers(1, 4))
    )
)
def test_the_oldest_of_the_tenant_with_the_most_goes_first(
    steps: list[tuple[str, int, int]],
) -> None:
    order, model = TenantOrder[int](), Model()
    for step, entry, weight in steps:
        if step == "use":
            order.record_use(entry, str(entry % 3), weight)
            model.use(entry, weight)
        elif step == "remove" and entry in model.entries:
            order.remove_entry(entry)
            del model.entries[entry]
        elif model.entries and step == "next":
            assert order.find_next() == model.next()
            order.remove_entry(model.next())
            del model.entries[model.next()]
        assert len(order) == len(model.entries)
    while model.entries:
        first = model.next()
        assert order.find_next() == first
        order.remove_entry(first)
        del model.entries[first]
    with pytest.raises(IndexError):
        order.find_next()


def test_the_order_takes_no_more_memory_the_longer_it_is_used() -> None:
    order = TenantOrder[int]()
    sizes = []
    for number in range(10_000):
        order.record_use(number, "a")
        order.remove_entry(number - 10)
        if number % 1000 == 999:
            sizes.append(len(pickle.dumps(order)))
    assert max(sizes) < 4 * min(sizes)
