"""GGUF files of the tests' own: as small as they get, with the header of a real one."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(value: Any) -> bytes:
    """A value with its type."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case Sequence():
            each = [entry(one) for one in value]
            kind = each[0][:4] if each else struct.pack("<I", 4)
            return (
                struct.pack("<I", 9)
                + kind
                + struct.pack("<Q", len(each))
                + b"".join(one[4:] for one in each)
            )
    raise TypeError(value)


def gguf_file(values: Mapping[str, Any], weights: int = 4096, tensors: int = 2) -> bytes:
    """weights: bytes after the header."""
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(values))
    for name, value in values.items():
        head += text(name) + entry(value)
    for at in range(tensors):
        head += text(f"blk.{at}.weight") + struct.pack("<IQQIQ", 2, 32, 32, 1, at * 2048)
    return head + bytes(-len(head) % 32) + bytes(range(256)) * (weights // 256)


LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 16,
    "llama.context_length": 8192,
    "llama.embedding_length": 2048,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.rope.freq_base": 500000.0,
}
"""Numbers of Llama 3.2 1B."""
