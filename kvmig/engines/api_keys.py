"""Keys of the OpenAI API: by flag, or from the environment, where only this user can read them."""

from __future__ import annotations

import os
from collections.abc import Sequence

VARIABLE = "VLLM_API_KEY"
"""vLLM's; the flag goes before it."""


def api_keys(given: Sequence[str] | None) -> list[str]:
    """given: of --api-key. As vLLM has it: an empty key is none."""
    return [key for key in (given or [os.environ.get(VARIABLE, "")]) if key]
