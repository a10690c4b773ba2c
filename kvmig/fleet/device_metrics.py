"""The metrics of GPUs: how much memory there is and whose it is, how busy they are. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from kvmig.core.devices import DeviceRecord
from kvmig.fleet.worker_nodes import WorkerNode
from kvmig.fleet.workers import FleetWorker

LABELS = ("worker", "gpu")
"""`gpu` is the UUID: an index means another GPU after one was taken out."""


def records_of(
    here: Iterable[DeviceRecord], workers: Iterable[FleetWorker]
) -> Mapping[str, DeviceRecord]:
    """What drivers say of all GPUs, by UUID. here: those of the server's host."""
    return {one.uuid: one for one in (*here, *(gpu for each in workers for gpu in each.devices))}


def of_devices(
    nodes: Iterable[WorkerNode],
    records: Mapping[str, DeviceRecord],
    second: Mapping[str, str],
) -> list[Metric]:
    """The metrics of the GPUs of all nodes. records: what their drivers say, by UUID. second: the
    names of models by the keys of their second deployments, while they roll out."""
    info = GaugeMetricFamily(
        "kvmig_gpu_info", "Index and name of a GPU: always 1.", labels=[*LABELS, "index", "name"]
    )
    total = GaugeMetricFamily(
        "kvmig_gpu_memory_bytes", "Memory that processes can have of a GPU.", labels=LABELS
    )
    used = GaugeMetricFamily(
        "kvmig_gpu_memory_used_bytes",
        "Memory in use of a GPU, by whose it is: the fleet's, or others'.",
        labels=[*LABELS, "whose"],
    )
    claimed = GaugeMetricFamily(
        "kvmig_gpu_claimed_bytes",
        "Memory of a GPU that a model's instances claim, or a unit for its KV cache.",
        labels=[*LABELS, "model"],
    )
    busy = GaugeMetricFamily(
        "kvmig_gpu_utilization_ratio",
        "Part of the driver's last sampling period in which a GPU computed, 0 to 1.",
        labels=LABELS,
    )
    power = GaugeMetricFamily("kvmig_gpu_power_watts", "Power that a GPU draws.", labels=LABELS)
    for node in nodes:
        for one in node.devices:
            labels = [node.name, one.id]
            total.add_metric(labels, one.total)
            sizes: Counter[str] = Counter()
            for holder, size in one.claims.items():
                sizes[second.get(holder, holder)] += size
            for holder, size in sizes.items():
                claimed.add_metric([*labels, holder], size)
            record = records.get(one.id)
            if record is None:
                continue
            info.add_metric([*labels, str(record.index), record.name], 1)
            used.add_metric([*labels, "others"], one.others)
            used.add_metric([*labels, "fleet"], max(0, record.used - one.others))
            if record.busy is not None:
                busy.add_metric(labels, record.busy)
            if record.watts is not None:
                power.add_metric(labels, record.watts)
    return [info, total, used, claimed, busy, power]
