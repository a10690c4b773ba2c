"""What toys exchange with each other; with clients they exchange what transformers engines do."""

from __future__ import annotations

import msgspec

from kvmig.engines.transformers.payload import Submitted


class Moving(msgspec.Struct, frozen=True):
    """A request on its way: all that its next step depends on, but for the KV."""

    asked: Submitted
    outputs: bytes
    """Tokens that it has put out."""
    computed: int
    """Tokens whose KV is in the blocks."""
