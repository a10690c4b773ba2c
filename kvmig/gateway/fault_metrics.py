"""Prometheus: instances that went, and what became of their requests."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class FaultMetrics:
    """An `Observer`'s part."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._missing = Counter(
            "kvmig_instances_missing_total",
            "Instances that could not be relied on any more: silent, hung, failed or lost.",
            ("instance", "ailment"),
            registry=registry,
        )
        self._again = Counter(
            "kvmig_requests_run_again_total",
            "Requests that were run again because their instance was missing.",
            registry=registry,
        )
        self._tokens = Counter(
            "kvmig_recomputed_tokens_total",
            "Tokens of those requests, prompt and output; the prefix cache may hold some.",
            registry=registry,
        )
        self._poisoned = Counter(
            "kvmig_requests_poisoned_total",
            "Requests that were failed because instances crashed while they ran them.",
            registry=registry,
        )
        self._unread = Counter(
            "kvmig_requests_unread_total",
            "Requests that were failed because their client didn't read (--max-unread).",
            registry=registry,
        )

        self._refused = Gauge(
            "kvmig_messages_refused",
            "Messages that a process has refused since its start, by reason.",
            ("process", "reason"),
            registry=registry,
            multiprocess_mode="max",  # all front ends hear the same of a process
        )
        self._told: dict[str, Mapping[str, int]] = {}

    def messages_refused(self, process: str, counts: Mapping[str, int]) -> None:
        """Counted by the process itself."""
        before = self._told.get(process, {})
        if counts == before:
            return
        for reason in before.keys() | counts.keys():  # none of a reason: it has started again
            self._refused.labels(process, reason).set(counts.get(reason, 0))
        self._told[process] = counts

    def missing(self, instance: str, ailment: str) -> None:
        """An instance can't be relied on any more."""
        self._missing.labels(instance, ailment).inc()

    def ran_again(self, tokens: int) -> None:
        """A request runs again elsewhere."""
        self._again.inc()
        self._tokens.inc(tokens)

    def poisoned(self) -> None:
        """A request was failed for what it does to instances."""
        self._poisoned.inc()

    def unread(self) -> None:
        """A request was failed because its client didn't read."""
        self._unread.inc()
