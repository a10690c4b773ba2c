"""Prometheus texts of several processes as one, each with labels of its own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Part = tuple[Mapping[str, str], str]
"""Labels that a text's samples get, before their own of the same name; and the text."""


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def parsed(part: Part) -> Iterator[Metric]:
    """The text's metric families. Raises ValueError for a text that isn't an exposition."""
    labels, text = part
    for family in text_string_to_metric_families(text):
        samples = family.samples
        family.samples = [one._replace(labels={**one.labels, **labels}) for one in samples]
        yield family


def merged(parts: Iterable[Iterable[Metric]]) -> bytes:
    """One text: of each family what it is once, and the samples of all.

    Families of one name and several types become untyped.
    """
    families: dict[str, Metric] = {}
    for family in (family for part in parts for family in part):
        known = families.setdefault(family.name, family)
        if known is not family:
            if known.type != family.type:
                known.type = "unknown"
            known.samples.extend(family.samples)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families.values()))
    return generate_latest(registry)
