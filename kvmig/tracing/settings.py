"""What the environment says of traces: OpenTelemetry's variables, and one of kvmig's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from kvmig.core.errors import ConfigError

Protocol = Literal["http/protobuf", "grpc"]
ParentRule = Literal["link", "trust"]

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PARENTS = "KVMIG_TRACE_PARENTS"


class TraceSettings(NamedTuple):
    """How spans go to the collector. Endpoint, headers, sampler and sizes of batches are read from
    the environment by opentelemetry-sdk itself."""

    protocol: Protocol = "http/protobuf"
    parents: ParentRule = "link"
    """What a fleet's proxies do with a client's traceparent."""


def settings_of(environment: Mapping[str, str]) -> TraceSettings | None:
    """What the environment asks for; None: no traces. Raises ConfigError."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    named = any(environment.get(name) for name in ENDPOINTS)
    if exporter == "none" or not (named or exporter):
        return None
    if exporter not in ("", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter!r:.100}, must be otlp or none")
    protocol = "http/protobuf"
    for name in reversed(PROTOCOLS):
        if given := environment.get(name, "").strip():
            protocol = given
            if given not in ("http/protobuf", "grpc"):
                raise ConfigError(f"{name} is {given!r:.100}, must be http/protobuf or grpc")
    parents = environment.get(PARENTS, "").strip() or "link"
    if parents not in ("link", "trust"):
        raise ConfigError(f"{PARENTS} is {parents!r:.100}, must be link or trust")
    return TraceSettings(
        "grpc" if protocol == "grpc" else "http/protobuf",
        "trust" if parents == "trust" else "link",
    )
