"""The data plane alone: blocks of one cache into another one, with checksums.

For stacks that have a control plane of their own. python -m examples.data_plane
"""

from __future__ import annotations

import numpy as np

from kvmig.core.layout import fused
from kvmig.kernels.copy import address_of, copy_blocks
from kvmig.kernels.layouts import CacheGroup, kv_layout

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_SIZE = 4, 64, 8, 16, 64


def main() -> None:
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)
    here = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    there = np.zeros(shape, np.float32)
    layouts = [
        kv_layout(
            CacheGroup(
                "LBHNC",
                (cache.ctypes.data,),
                *(LAYERS, BLOCKS, HEADS, TOKENS, HEAD_SIZE, HEAD_SIZE),
                itemsize=4,
            )
        )
        for cache in (here, there)
    ]
    assert layouts[0].matches(layouts[1])

    leave, arrive = [7, 3, 40], [0, 1, 2]
    wire = bytearray(len(leave) * layouts[0].block_bytes)
    staged = fused(address_of(wire), layouts[0])
    sent = copy_blocks(layouts[0].regions, staged, leave, range(3), BLOCKS, 3)
    came = copy_blocks(staged, layouts[1].regions, range(3), arrive, 3, BLOCKS)

    assert sent == came
    assert np.array_equal(here[:, leave], there[:, arrive])
    print(f"{len(wire)} bytes in {len(leave)} blocks, checksums agree")


if __name__ == "__main__":
    main()
