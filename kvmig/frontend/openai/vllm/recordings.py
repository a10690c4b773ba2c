"""How long the recordings are that vLLM makes text of, for the usage of their calls.

What its decoder found counts, whichever form the answer has: of text, streams and translations no
answer names it.
"""

from __future__ import annotations

import math
from typing import Any

from kvmig.asgi.call import current_call


def count_recordings(serving: Any) -> None:
    """Count what vLLM's object for transcriptions or translations decodes.

    None: the model takes no recordings.
    """
    if serving is None:
        return
    prepare = serving._preprocess_speech_to_text

    async def prepare_and_count(*args: Any, **options: Any) -> tuple[Any, float, Any]:
        inputs, duration_s, starts = await prepare(*args, **options)
        if (call := current_call.get()) is not None:
            call.seconds += math.ceil(duration_s)
        return inputs, duration_s, starts

    serving._preprocess_speech_to_text = prepare_and_count
