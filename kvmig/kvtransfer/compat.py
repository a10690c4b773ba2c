"""Whether two engines' KV blocks may be exchanged, as one string that must be equal."""

from __future__ import annotations

from hashlib import blake2b

from kvmig.ground.layout import KVLayout


def fingerprint(layout: KVLayout) -> str:
    """Model, weights, block tokens and the runs of a block: readable, and exact by its hash."""
    runs = ",".join(str(region.run) for region in layout.regions)
    digest = blake2b(f"{layout.model}|{runs}".encode(), digest_size=8).hexdigest()
    shape = f"{layout.block_tokens} tokens in {layout.block_bytes} bytes, {digest}"
    return f"{shape}, weights {layout.weights}" if layout.weights else shape
