"""The size of a model's weights where they are loaded, by the headers of its files."""

from __future__ import annotations

from pathlib import Path

from kvmig.engines.identity import tensors_of

WIDE = {"F64": 8, "F32": 4}
"""Types that engines use only where a flag asks for them, and their sizes."""
KEPT = ("float32", "float")
"""Values of --dtype under which they do."""
USUAL = 2
"""Bytes of a number in the types that they become."""


def weight_bytes(model: str, dtype: str = "auto") -> int:
    """Bytes of all weights of a folder as an engine holds them; 0: it isn't a folder.

    dtype: the engine's flag. What other flags change, such as weights that are quantised while
    they are loaded, isn't counted: then it is more than it takes.
    """
    folder = Path(model)
    if not folder.is_dir():
        return 0
    total = 0
    for tensor in tensors_of(folder):
        words = tensor.name.split()
        size = WIDE.get(words[1]) if len(words) > 1 else None
        wide = size is not None and dtype not in KEPT
        total += tensor.size * USUAL // size if wide and size else tensor.size
    return total
