"""A mirror's metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class MirrorMetrics:
    """The metrics of one mirror."""

    def __init__(self, stored_bytes: Callable[[], float]) -> None:
        registry = self._registry = CollectorRegistry()
        self.files = Counter(
            "kvmig_hub_files",
            "Answers with a file, by where it came from: here, coming (it was being downloaded), or"
            " passed (from the hub, not kept).",
            ["way"], registry=registry,
        )  # fmt: skip
        self.downloads = Counter(
            "kvmig_hub_downloads",
            "Downloads that were begun or gone on with, by the place: hub or peer.",
            ["place"], registry=registry,
        )  # fmt: skip
        self.downloaded_bytes = Counter(
            "kvmig_hub_downloaded_bytes", "Bytes that were downloaded, by the place: hub or peer.",
            ["place"], registry=registry,
        )  # fmt: skip
        self.rejected = Counter(
            "kvmig_hub_rejected",
            "Downloads of which the content was not what the hub lists; nothing of them is kept.",
            registry=registry,
        )
        self.stale = Counter(
            "kvmig_hub_stale", "Answers with what was known before, while the hub was gone.",
            registry=registry,
        )  # fmt: skip
        self.passed = Counter(
            "kvmig_hub_passed",
            "Files, or parts of them, that were passed on from the hub and not kept.",
            registry=registry,
        )
        Gauge("kvmig_hub_stored_bytes", "Size of the files that are here.", registry=registry
              ).set_function(stored_bytes)  # fmt: skip
        self.evicted = Counter(
            "kvmig_hub_evicted", "Files that went to make room.", registry=registry
        )

    def text(self) -> bytes:
        """Write all of them in Prometheus's text format."""
        return generate_latest(self._registry)
