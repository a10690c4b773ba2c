"""Libraries that vLLM's CPU build wants in LD_PRELOAD before its process starts.

vLLM sets them for the worker processes that it spawns; a llumlet is its own worker.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_LIBRARIES = (
    ("vllm", "libs/libtcmalloc_minimal*.so*"),
    ("torch", "lib/libgomp*.so*"),
    ("torch", "../torch.libs/libgomp*.so*"),
)


def preloaded(present: str = "") -> str:
    """The value of LD_PRELOAD for an instance: `present` and what it lacks (cf. vLLM's
    `platforms/cpu.py`)."""
    words = [word for word in present.split(":") if word]
    for package, pattern in _LIBRARIES:
        stem = pattern.rsplit("/", 1)[-1].split("*")[0].removesuffix("_minimal")
        if any(stem in word for word in words) or ("gomp" in stem and "iomp" in present):
            continue
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        found = sorted(Path(spec.origin).parent.glob(pattern))
        if found:
            words.append(str(found[0].resolve()))
    return ":".join(words)
