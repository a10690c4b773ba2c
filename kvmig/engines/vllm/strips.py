"""What lies inside one head of one KV block: strips of bytes, each with its tokens in order.

A strip of `width` bytes a token holds N tokens in one run of N * width bytes, so tokens
t .. t + g are one run of it. On a GPU (HND) a head's block is one strip. vLLM's CPU attention
keeps keys and values apart and in the order that its instruction set likes
(vLLM `csrc/cpu/cpu_attn_*.hpp`, `reshape_and_cache`):

vec, vec16: keys transposed, one strip a head dimension; values row by row, one strip.
amx: keys in groups of 16 tokens, one strip; values in columns of 16 dimensions, each with
tokens in pairs: one strip a column.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmig.engines.vllm.cache_shape import LayerCache
from kvmig.ground.errors import UnsupportedLayout

AMX_COLUMN = 16
"""Head dimensions in one column of values."""
GRAIN = {"": 1, "vec": 1, "vec16": 1, "amx": 16}
"""Tokens that can't be told apart in a strip."""


@dataclass(frozen=True, slots=True)
class Strips:
    """`count` strips one after the other, each of `width` bytes a token."""

    width: int
    count: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all of them."""
        return self.width * self.count


def strips_of(layer: LayerCache) -> tuple[Strips, ...]:
    """A head's block, from its first byte to its last. Raises UnsupportedLayout."""
    if layer.attention not in GRAIN:
        raise UnsupportedLayout(
            f"CPU attention {layer.attention}: its order of keys and values isn't known"
        )
    if layer.attention and layer.itemsize == 1:
        raise UnsupportedLayout(f"CPU attention {layer.attention} with a KV cache of 8-bit floats")
    width = layer.shape[3] * layer.itemsize
    if layer.attention == "":
        return (Strips(width, 1),)
    half = width // 2  # keys, then as much of values
    if layer.attention == "amx":
        column = AMX_COLUMN * layer.itemsize
        return (Strips(half, 1), Strips(column, half // column))
    return (Strips(layer.itemsize, half // layer.itemsize), Strips(half, 1))
