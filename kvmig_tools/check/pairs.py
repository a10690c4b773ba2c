"""How many states two requests have that share nothing but their instances.

They are too many to visit, and needn't be: where no event of one touches the other
(`together.py`), the states that both can be in are a product: each of the first's with each of
the second's. A fault begins a new product: one of its own moves one request on; one that hits
an instance, the front end or the scheduler moves all that it hits, at once. So the states are
a union of as many products as there are kinds of faults, and its size can be had from the
states of one request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from kvmig_tools.check.cluster import Step


class Automaton(Protocol):
    """One request: `Request`."""

    def free(self, number: int) -> list[Step]:
        """What may happen without a fault."""
        ...

    def faults(self, number: int) -> list[Step]:
        """What may happen with one."""
        ...


class Product(NamedTuple):
    """All pairs of a state of the first and one of the second."""

    first: frozenset[int]
    second: frozenset[int]


def count(first: Automaton, second: Automaton, faults: int) -> int:
    """States of both, with the faults that are left; 0 is each one's first state."""
    both = (first, second)
    start = Product(_closed(first, [0]), _closed(second, [0]))
    by_left: dict[int, set[Product]] = {left: set() for left in range(faults + 1)}
    by_left[faults].add(start)
    for left in range(faults, 0, -1):
        for product in by_left[left]:
            for cost, after in _faulty(both, product, left):
                if not all(after):
                    continue
                closed = (_closed(one, states) for one, states in zip(both, after, strict=True))
                by_left[left - cost].add(Product(*closed))
    return sum(_size(list(products)) for products in by_left.values())


def _closed(request: Automaton, states: Iterable[int]) -> frozenset[int]:
    """With all that comes of them without a fault."""
    found = set(states)
    todo = list(found)
    while todo:
        for step in request.free(todo.pop()):
            if step.target not in found:
                found.add(step.target)
                todo.append(step.target)
    return frozenset(found)


def _faulty(
    both: tuple[Automaton, Automaton], product: Product, left: int
) -> Iterator[tuple[int, Product]]:
    """Cost and targets of all faults."""
    own: list[dict[int, set[int]]] = [defaultdict(set), defaultdict(set)]
    hit: list[dict[str, set[int]]] = [defaultdict(set), defaultdict(set)]
    hurt: list[dict[str, set[int]]] = [defaultdict(set), defaultdict(set)]
    for index, request in enumerate(both):
        for state in product[index]:
            for step in request.faults(state):
                kind = step.shared.partition(",")[0]
                if kind:
                    hit[index][kind].add(step.target)
                    hurt[index][kind].add(state)
                elif step.cost <= left:
                    own[index][step.cost].add(step.target)
    for cost, targets in own[0].items():
        yield cost, Product(frozenset(targets), product.second)
    for cost, targets in own[1].items():
        yield cost, Product(product.first, frozenset(targets))
    for kind in {*hit[0], *hit[1]}:
        struck = Product(frozenset(hit[0][kind]), frozenset(hit[1][kind]))
        spared = Product(product.first - hurt[0][kind], product.second - hurt[1][kind])
        yield 1, struck
        yield 1, Product(struck.first, spared.second)
        yield 1, Product(spared.first, struck.second)


def _size(products: list[Product]) -> int:
    """Of their union: states of the first that are in the same products have the same partners."""
    member = defaultdict[int, int](int)
    for number, product in enumerate(products):
        for state in product.first:
            member[state] |= 1 << number
    within = Counter(member.values())
    partners = [_bits(product.second) for product in products]
    total = 0
    for which, states in within.items():
        union = 0
        for number, bits in enumerate(partners):
            if which >> number & 1:
                union |= bits
        total += states * union.bit_count()
    return total


def _bits(states: frozenset[int]) -> int:
    packed = bytearray(max(states, default=0) // 8 + 1)
    for state in states:
        packed[state // 8] |= 1 << state % 8
    return int.from_bytes(packed, "little")
