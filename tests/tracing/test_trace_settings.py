"""What of OpenTelemetry's variables turns traces on."""

from __future__ import annotations

import pytest

from kvmig.core.errors import ConfigError
from kvmig.tracing import collector
from kvmig.tracing.collector import check_packages
from kvmig.tracing.settings import TraceSettings, settings_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "llms"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_traces_are_off_without_a_collector_and_when_they_are_forbidden(
    environment: dict[str, str],
) -> None:
    assert settings_of(environment) is None


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({}, TraceSettings()),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, TraceSettings()),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, TraceSettings("grpc")),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            TraceSettings(),
        ),
        ({"KVMIG_TRACE_PARENTS": "trust"}, TraceSettings(parents="trust")),
    ],
)
def test_a_collector_turns_traces_on(more: dict[str, str], settings: TraceSettings) -> None:
    assert settings_of({**ENDPOINT, **more}) == settings


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf or grpc"),
        ("KVMIG_TRACE_PARENTS", "believe", "link or trust"),
    ],
)
def test_a_value_that_is_not_known_is_refused_by_name(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}', must be {allowed}"):
        settings_of({**ENDPOINT, name: value})


def test_a_missing_package_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(collector.EXPORTERS, "grpc", "no_such_package.exporter")
    with pytest.raises(ConfigError, match=r"pip install 'kvmig\[otel\]'"):
        check_packages(TraceSettings("grpc"))
    check_packages(None)
