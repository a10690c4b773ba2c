"""The regions of an engine's KV cache, from the name of its order.

Logical shape: [L, B, H, N, C]: layers, blocks, heads, tokens of a block, content. vLLM 0.32 packs
key and value of a head and token into one content (`vllm/v1/kv_cache_layout.py`); engines before
it keep two halves, [2, blocks, ...] or [blocks, 2, ...] in a tensor a layer. MLA is one head
whose content is the latent. Each KV cache group has block ids of its own: describe each by one
`CacheGroup` and copy it by its ids; groups may share memory.

Example: 2 layers, 3 blocks, 4 heads, 16 tokens, key and value of 64 values of 2 bytes:

    group = CacheGroup("LBHNC", (base,), 2, 3, 4, 16, 64, 64, 2)
    regions(group)  # 2 of 16384 bytes, at base and at base + 3 * 16384
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from kvmig.core.errors import UnsupportedLayout
from kvmig.core.layout import BlockRegion, KVLayout

ORDERS = {
    "LBHNC": "LBHNC",
    "LBNHC": "LBNHC",
    "BLHNC": "BLHNC",
    "BLNHC": "BLNHC",
    "2BNHC": "LKBNHC",
    "2BHNC": "LKBHNC",
    "B2NHC": "LBKNHC",
    "B2HNC": "LBKHNC",
    "LBNC": "LBNHC",
    "BLNC": "BLNHC",
}
"""Axes from the outermost inwards; K: key or value. LBNC and BLNC have no heads (MLA)."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one shape that share block ids. Raises UnsupportedLayout if it can't be copied.

    bases: the address of all, or one address a layer where each has memory of its own; heads: on
    this rank; head_size, head_size_v: values in a key and in a value (0: there is none, as in
    MLA); itemsize: bytes of one; padding: bytes after each layer's part of a block.
    """

    order: str
    bases: tuple[int, ...]
    layers: int
    blocks: int
    heads: int
    block_tokens: int
    head_size: int
    head_size_v: int
    itemsize: int
    padding: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UnsupportedLayout(f"KV layout {self.order} is not one of {', '.join(ORDERS)}")
        for name in ("layers", "blocks", "heads", "block_tokens", "head_size"):
            if getattr(self, name) < 1:
                raise UnsupportedLayout(f"{name} is {getattr(self, name)}, should be 1 or more")
        if self.itemsize not in (1, 2, 4):
            raise UnsupportedLayout(f"itemsize is {self.itemsize}, should be 1, 2 or 4")
        if min(self.head_size_v, self.padding) < 0:
            raise UnsupportedLayout("head_size_v and padding should be 0 or more")
        if "H" not in self.order and self.heads != 1:
            raise UnsupportedLayout(f"KV layout {self.order} has one head, not {self.heads}")
        if self.halves and self.head_size != self.head_size_v:
            raise UnsupportedLayout(f"KV layout {self.order}: key and value differ in size")
        if self.halves and self.padding:
            raise UnsupportedLayout(f"KV layout {self.order} can't be padded")
        wanted = {1, self.layers} if self.axes[0] == "L" else {1}
        if len(self.bases) not in wanted:
            raise UnsupportedLayout(
                f"KV layout {self.order} of {self.layers} layers has {len(self.bases)} addresses"
            )

    @property
    def axes(self) -> str:
        """The axes from the outermost inwards, of L, K, B, H, N and C."""
        return ORDERS[self.order]

    @property
    def halves(self) -> bool:
        """Whether keys and values lie apart."""
        return "K" in self.axes

    def sizes(self) -> dict[str, int]:
        """The size of every axis; C in bytes."""
        content = self.head_size if self.halves else self.head_size + self.head_size_v
        return {
            "L": self.layers,
            "K": 2 if self.halves else 1,
            "B": self.blocks,
            "H": self.heads,
            "N": self.block_tokens,
            "C": content * self.itemsize,
        }

    def strides(self) -> dict[str, int]:
        """Bytes from one to the next of every axis. C's are bytes themselves."""
        sizes, strides, stride = self.sizes(), {"K": 0}, 1
        for axis in reversed(self.axes):
            if axis in "LB" and stride == self.page_bytes:
                stride += self.padding
            strides[axis] = stride
            stride *= sizes[axis]
        return strides

    @property
    def page_bytes(self) -> int:
        """One layer's part of one block, without padding."""
        sizes = self.sizes()
        return sizes["K"] * sizes["H"] * sizes["N"] * sizes["C"]

    def places(self, axes: str) -> list[int]:
        """The address at index 0 of all other axes, for every index of these (of L and K)."""
        sizes, strides = self.sizes(), self.strides()
        starts: list[int] = []
        for index in product(*(range(sizes[axis]) for axis in axes)):
            own = len(self.bases) > 1 and "L" in axes
            base = self.bases[index[axes.index("L")]] if own else self.bases[0]
            steps = zip(axes, index, strict=True)
            starts.append(base + sum(strides[a] * i for a, i in steps if not (own and a == "L")))
        return starts


def regions(group: CacheGroup) -> tuple[BlockRegion, ...]:
    """The runs that a block consists of, as long as they can be, in the order of layers."""
    before, inside = group.axes.split("B")
    if group.padding and "L" in inside:
        before, inside = "L", inside.replace("L", "")
    sizes = group.sizes()
    run = 1
    for axis in inside:
        run *= sizes[axis]
    stride = group.strides()["B"]
    return tuple(BlockRegion(start, stride, run) for start in group.places(before))


def kv_layout(group: CacheGroup, model: str = "") -> KVLayout:
    """The layout that a transfer of the group's blocks needs."""
    return KVLayout(regions(group), group.blocks, group.block_tokens, model)
