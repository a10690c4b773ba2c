"""The way to a collector: what arrives there, and what happens while it is away."""

from __future__ import annotations

import socket
import time

import pytest

from bench.otlp_collector import otlp_collector
from kvmig.process.sockets import free_port
from kvmig.tracing import collector as ours
from kvmig.tracing.collector import TraceCollector, open_collector
from kvmig.tracing.settings import TraceSettings, settings_of


def opened(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> TraceCollector:
    """A collector as a process with these variables has it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = open_collector(settings_of(environment), "front-1")
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("more", "service"), [({}, "kvmig"), ({"OTEL_SERVICE_NAME": "llms"}, "llms")]
)
async def test_spans_arrive_before_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str], service: str
) -> None:
    with otlp_collector() as there:
        here = opened(
            monkeypatch, {**there.environment, "OTEL_BSP_SCHEDULE_DELAY": "60000", **more}
        )
        here.tracer.begin("call", time.time(), {"kvmig.bytes": 3}).end(time.time())
        await here.close()
    (span,) = there.spans
    assert (span.name, span.attributes) == ("call", {"kvmig.bytes": 3})
    assert (span.service, span.process) == (service, "front-1")


async def test_a_share_of_calls_is_sampled_as_the_variables_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with otlp_collector() as there:
        sampler = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
        here = opened(monkeypatch, {**there.environment, **sampler})
        for _ in range(1000):
            here.tracer.begin("call", time.time()).end(time.time())
        await here.close()
    assert 40 < len(there.spans) < 180


async def test_a_collector_that_is_away_delays_the_end_by_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ours, "CLOSE_S", 0.2)
    away = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    here = opened(monkeypatch, {**away, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"})
    here.tracer.begin("call", time.time()).end(time.time())
    began = time.monotonic()
    await here.close()
    assert time.monotonic() - began < 1.0


def test_nothing_is_opened_without_settings() -> None:
    assert open_collector(None, "front-1") is None
    assert TraceSettings().protocol == "http/protobuf"


def test_a_collector_that_ends_answers_what_was_sent_before() -> None:
    with socket.socket() as client:
        with otlp_collector() as there:
            client.connect(("127.0.0.1", there.port))
            client.sendall(b"POST /v1/traces HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        client.settimeout(10.0)
        assert client.recv(1000).startswith(b"HTTP/1.0 200 OK")
