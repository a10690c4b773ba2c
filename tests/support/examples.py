"""How many examples hypothesis makes up for what needs more than a profile's."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

SOME = 3
"""One of so many in CI, where they are the same each time."""


def examples(most: int, **more: Any) -> settings:
    """more: of `settings`."""
    few = os.environ.get("KVMIG_HYPOTHESIS") == "ci"
    return settings(max_examples=-(-most // SOME) if few else most, **more)
