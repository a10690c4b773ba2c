"""In a process of its own: what each kind of image takes at most while vLLM decodes it.

Prints a line of JSON: of each kind the bytes that the process grew by, and those that are counted.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np

from tests.support.media_files import IMAGES

SIZE = (2048, 1536)
STATUS = Path("/proc/self/status")


def _value(name: str) -> int:
    line = next(one for one in STATUS.read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def measure() -> dict[str, tuple[int, int]]:
    from vllm.multimodal.media.image import ImageMediaIO

    from kvmig.frontend.media_budget import MediaBudget
    from kvmig.frontend.openai.vllm.decoding import bound_decoding, decode_within

    bound_decoding()
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    found = {}
    for kind, make in IMAGES.items():
        data = make(SIZE)
        took = []
        for most in (10**12, 0):
            trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before = _value("VmRSS")
            budget = MediaBudget(most)
            try:
                made = decode_within(budget, lambda: ImageMediaIO().load_bytes(data))  # noqa: B023
                array = np.asarray(made.media)
                took.append(_value("VmHWM") - before)
                del made, array
            except Exception as error:  # noqa: BLE001 - what it says it would take
                took.append(error.size)  # type: ignore[attr-defined]
        found[kind] = (took[0], took[1])
    return found


if __name__ == "__main__":
    print(json.dumps(measure()))
