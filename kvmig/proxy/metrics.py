"""What a proxy's own metrics show."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from kvmig.proxy.activator import RequestCounts


class DoorMetrics:
    """What /metrics shows."""

    def __init__(self, counts: RequestCounts, age_s: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._counts = counts
        self.requests = prometheus_client.Counter(
            "kvmig_proxy_requests_total",
            "Calls that were answered, by model (empty: none that is there) and status.",
            ("model", "status"),
            registry=self.registry,
        )
        self.cold_start = prometheus_client.Histogram(
            "kvmig_proxy_cold_start_seconds",
            "For how long requests were held that were then relayed.",
            ("model",),
            registry=self.registry,
            buckets=(0.1, 0.3, 1, 2, 5, 10, 30, 60, 120, 300, 600),
        )
        self.relayed = prometheus_client.Counter(
            "kvmig_proxy_relay_bytes_total",
            "Bytes of answers that were relayed.",
            registry=self.registry,
        )
        age = prometheus_client.Gauge(
            "kvmig_proxy_snapshot_age_seconds",
            "Age of the keys and routes that the proxy has: time since the server's last message.",
            registry=self.registry,
        )
        age.set_function(age_s)
        self.registry.register(self)

    def show_certificate(self, expires: Callable[[], float]) -> None:
        """Show when the port's certificate expires. expires: Unix time."""
        prometheus_client.Gauge(
            "kvmig_proxy_certificate_expiry_timestamp_seconds",
            "When the certificate in use expires, in Unix time.",
            registry=self.registry,
        ).set_function(expires)

    def collect(self) -> Iterable[Metric]:
        """The collector's metrics, for prometheus_client."""
        running = GaugeMetricFamily(
            "kvmig_proxy_running", "Requests relayed now.", labels=["model"]
        )
        held = GaugeMetricFamily("kvmig_proxy_held", "Requests held now.", labels=["model"])
        for model, (runs, waits) in self._counts.states().items():
            running.add_metric([model], runs)
            held.add_metric([model], waits)
        return running, held
