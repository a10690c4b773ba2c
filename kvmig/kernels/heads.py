"""Head-wise blocks of a KV cache: which units are free, and in which rows tokens lie.

csrc/heads.h describes a unit, a block and its table. `NativeHeads` is that library,
`ReferenceHeads` the same in NumPy: the oracle of its tests, and what runs without a compiler.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvmig.core.errors import KernelUnavailable
from kvmig.kernels import abi, native

Ints = NDArray[np.int64]

log = logging.getLogger(__name__)


class HeadUnits(Protocol):
    """Units [0, n), of which some are free. One thread at a time."""

    @property
    def free(self) -> int:
        """How many are free."""
        ...

    def take_units(self, n: int) -> Ints:
        """Take n free units [n]. Raises ValueError if there are fewer."""
        ...

    def give_units(self, units: Ints) -> None:
        """Give units [n] back. Raises ValueError unless all were held, and then keeps all."""
        ...

    def rows(self, table: Ints, tokens: int, index: Ints, first: int, heads: int) -> Ints:
        """Rows of keys [len(index), heads] of tokens, in the units [first, first + heads) of
        their blocks; those of values lie `tokens` further.

        table: units [blocks, units of a block]; tokens: of a unit; index [n]: block * tokens +
        place. Raises ValueError for an index or units outside the table.
        """
        ...


class ReferenceHeads:
    """The operations in NumPy."""

    def __init__(self, units: Ints) -> None:
        """units: those that are free at first, the last one goes first."""
        self._free = units.tolist()
        self._known = set(self._free)

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take_units(self, n: int) -> Ints:
        if not 0 <= n <= len(self._free):
            raise ValueError(f"{n} units are wanted of {len(self._free)} free ones")
        return np.array([self._free.pop() for _ in range(n)], np.int64)

    def give_units(self, units: Ints) -> None:
        given = set(units.tolist())
        if len(given) < len(units) or not given <= self._known - set(self._free):
            raise ValueError("units are given back that are not in use")
        self._free += units.tolist()

    def rows(self, table: Ints, tokens: int, index: Ints, first: int, heads: int) -> Ints:
        blocks, places = np.divmod(index, tokens)
        outside = (blocks < 0).any() or (blocks >= len(table)).any()
        if outside or not 0 <= first <= first + heads <= table.shape[1]:
            raise ValueError("an index or units outside the table")
        rows: Ints = table[blocks, first : first + heads] * (2 * tokens) + places[:, None]
        return rows


class NativeHeads:
    """The operations of the C++ library. Raises KernelUnavailable where there is none."""

    def __init__(self, units: Ints) -> None:
        """units: those that are free at first, the last one goes first."""
        self._library = native.library()
        self._free = np.ascontiguousarray(units, np.int64)
        self._count = np.array([len(units)], np.int64)
        self._held = np.zeros(int(units.max(initial=-1)) + 1, np.uint8)

    @property
    def free(self) -> int:
        """How many are free."""
        return int(self._count[0])

    def take_units(self, n: int) -> Ints:
        out = np.empty(max(n, 0), np.int64)
        abi.check(self._library.kvmig_heads_take(*self._state(), n, out.ctypes.data))
        return out

    def give_units(self, units: Ints) -> None:
        units = np.ascontiguousarray(units, np.int64)
        abi.check(
            self._library.kvmig_heads_give(
                *self._state(), len(self._held), units.ctypes.data, len(units)
            )
        )

    def rows(self, table: Ints, tokens: int, index: Ints, first: int, heads: int) -> Ints:
        index = np.ascontiguousarray(index, np.int64)
        rows = np.empty((len(index), max(heads, 0)), np.int64)
        abi.check(
            self._library.kvmig_heads_rows(
                *(table.ctypes.data, *table.shape, tokens, index.ctypes.data, len(index)),
                *(first, heads, rows.ctypes.data),
            )
        )
        return rows

    def _state(self) -> tuple[int, int, int]:
        return self._free.ctypes.data, self._count.ctypes.data, self._held.ctypes.data


def heads(units: Ints) -> HeadUnits:
    """Free units, managed by the fastest implementation there is."""
    try:
        return NativeHeads(units)
    except KernelUnavailable as error:
        log.warning("head-wise blocks are managed by NumPy, which is slower: %s", error)
        return ReferenceHeads(units)
