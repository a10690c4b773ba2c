"""What traces cost a front end: off, beside the version before there were any; on at 10 %.

kvmig.serve several times, all up, each with the stand-in for an engine's worker of
bench/front_end_cost.py: the same streams go to one after the other, the order turns, and pairs are
made per round. cpu: processor time of the front end's process a token.

server_off_us: what a token costs more with traces off than at `--before`, a checkout of a revision
  without traces. server_on_ratio: processor time with 10 % of calls sampled, over that with traces
  off. Both differ by more between two rounds of one server than traces cost.
So the cost is measured in its parts, too, in this process, each the least of several runs:
unsampled_us, sampled_us: of all that is done for a call, and for one sequence of it; export_us: of
  sending the spans of one call, what receives them included.
off_us: of what a call does for traces also when they are off (it reads from its first output how
  long it was in the engine's queue), for each of `--tokens` tokens.
on_ratio: 1, and these parts with 10 % of calls sampled over what a call with `--tokens` tokens
  costs a front end with traces off.
`--capture FILE` writes the spans of one call of a real server that moves once, for
`scripts/draw_trace.py`, and measures nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx
import uvloop

from bench import report
from bench.client import session
from bench.front_end_cost import FLAGS, one_round
from bench.otlp_collector import OtlpCollector, otlp_collector
from bench.overhead import plain_environment
from bench.site import all_up
from kvmig.models import BUNDLED
from kvmig.tracing.spans import AttributeValue
from kvmig_tools.served import SMALL, Served

SHARE = 0.1
EXPORT_S = 5.5
"""Longer than spans wait to be sent together (OTEL_BSP_SCHEDULE_DELAY, 5 s unless it is set)."""
CALLS, TRIES = 2_000, 5
BATCH = 50
"""Calls whose spans are sent together."""
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PYTHON = ("-P", "-m", "kvmig.serve")
"""-P, with PYTHONPATH: from the folder that the variable names, and not from the present one."""


@dataclass(frozen=True)
class Round:
    """The same streams at one server."""

    server: str
    number: int
    cpu_us: float
    """Of the front end's process, for a token."""


async def measure(
    servers: dict[str, Served], rounds: int, streams: int, tokens: int
) -> list[Round]:
    """The first round finds caches cold and is dropped."""
    done: list[Round] = []
    names = list(servers)
    async with session() as http:
        with report.progress() as bar:
            for number in bar.track(range(-1, rounds), description="rounds"):
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    one = await measured(http, servers[name], name, number, streams, tokens)
                    done += [one] if number >= 0 else []
    return done


async def measured(
    http: aiohttp.ClientSession, served: Served, name: str, number: int, streams: int, tokens: int
) -> Round:
    """One round at one server, with the time after it in which spans go to the collector."""
    before = process_s(served)
    await one_round(http, served, name, number, streams, tokens)
    await asyncio.sleep(EXPORT_S)
    after = process_s(served)
    return Round(name, number, (after - before) / (streams * tokens) * 1e6)


def process_s(served: Served) -> float:
    """Seconds of processor time of a server's main process, to the nanosecond."""
    assert served.process is not None
    files = Path(f"/proc/{served.process.pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def servers_of(
    step_ms: float, before: Path | None, collector: OtlpCollector, logs: Path
) -> dict[str, Served]:
    """Not started."""
    flags = [
        *FLAGS, f'--additional-config={{"step_ms": {step_ms:g}}}', "--instances=1",
        "--front-ends=1", "--shutdown-timeout=2",
    ]  # fmt: skip
    here = str(Path(__file__).resolve().parent.parent)
    folders = {"off": here, "on": here} | ({} if before is None else {"before": str(before)})
    sampling = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(SHARE),
    }
    return {
        name: Served(
            flags,
            model=BUNDLED,
            command=PYTHON,
            environment={
                **plain_environment(),
                "PYTHONPATH": folder,
                "PYTHONSAFEPATH": "1",
                **(sampling if name == "on" else {}),
            },
            log=logs / name,
        )
        for name, folder in folders.items()
    }


def call_us(ratio: float) -> float:
    """Microseconds of processor time of a call's spans. ratio: of calls that are sampled."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    from kvmig.asgi.call import HttpCall
    from kvmig.asgi.route_table import find_route
    from kvmig.core.clock import monotonic
    from kvmig.frontend.call_spans import CallSpans, end_call
    from kvmig.frontend.request_traces import RequestTraces
    from kvmig.frontend.requests import LiveRequest
    from kvmig.frontend.splice import StreamSplicer
    from kvmig.tracing.spans import SpanTracer

    class Nowhere(SpanExporter):
        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(TraceIdRatioBased(ratio), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    calls = CallSpans(SpanTracer(provider.get_tracer("bench"), monotonic, time.time), "model")
    traces, found = RequestTraces(), find_route("POST", "/v1/chat/completions")
    assert found is not None
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    began = time.process_time()
    for number in range(CALLS):
        call = HttpCall(str(number))
        call.trace = calls.begin(call, found.route, headers)
        call.trace.replace_headers(headers)
        now = monotonic()
        request = LiveRequest(
            str(number), "x", "c", StreamSplicer("i0"), 100, 0, [b""], now, now, call=call
        )
        traces.began(request)
        request.first_at = request.splicer.last_at = now
        traces.ended(request, failed=False)
        end_call(call.trace, call)
    took = time.process_time() - began
    provider.shutdown()
    return took / CALLS * 1e6


def queue_us() -> float:
    """Microseconds of processor time of reading a call's time in the queue."""
    from vllm.v1.engine import (
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
    )
    from vllm.v1.metrics.stats import PrefillStats

    from kvmig.engines.vllm.front import queue_times

    events = [EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)]
    events.append(EngineCoreEvent(EngineCoreEventType.SCHEDULED, 2.0))
    first = EngineCoreOutput("r", [1], events=events, prefill_stats=PrefillStats())
    outputs = EngineCoreOutputs(outputs=[first])
    began = time.process_time()
    for _ in range(CALLS):
        queue_times(outputs)
    return (time.process_time() - began) / CALLS * 1e6


def export_us(collector: OtlpCollector) -> float:
    """Microseconds of processor time of sending a sampled call's spans, and of receiving them."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = f"http://127.0.0.1:{collector.port}/v1/traces"
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("bench")
    said: dict[str, AttributeValue] = {"kvmig.bytes": 1, "kvmig.state": "committed"}
    spans = [tracer.start_span("span", attributes=said) for _ in range(5 * BATCH)]
    for span in spans:
        span.end()
    began = time.process_time()
    processor.force_flush()
    took = time.process_time() - began
    provider.shutdown()
    return took / BATCH * 1e6


def summarise(rounds: Sequence[Round], tokens: int, collector: OtlpCollector) -> dict[str, float]:
    """Medians of what is compared in each round, and the parts. tokens: of an answer."""
    by = {
        name: [one.cpu_us for one in rounds if one.server == name]
        for name in ("before", "off", "on")
    }
    summary = {
        "off_cpu_us": median(by["off"]),
        "server_on_ratio": median(on / off for on, off in zip(by["on"], by["off"], strict=True)),
        "unsampled_us": min(call_us(0.0) for _ in range(TRIES)),
        "sampled_us": min(call_us(1.0) for _ in range(TRIES)),
        "export_us": min(export_us(collector) for _ in range(TRIES)),
    }
    more_us = SHARE * (summary["sampled_us"] + summary["export_us"])
    more_us += (1 - SHARE) * summary["unsampled_us"]
    summary["off_us"] = min(queue_us() for _ in range(TRIES)) / tokens
    summary["on_ratio"] = 1 + more_us / (tokens * summary["off_cpu_us"])
    if by["before"]:
        pairs = zip(by["off"], by["before"], strict=True)
        summary["server_off_us"] = median(off - before for off, before in pairs)
    return summary


async def capture(served: Served, collector: OtlpCollector) -> list[dict[str, Any]]:
    """The spans of one call that moves."""
    body = {
        "model": served.model, "prompt": "Count: 0017 0018", "max_tokens": 200, "stream": True,
        "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "captured"}
    events = 0
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers) as answer,
    ):
        async for line in answer.aiter_lines():
            events += line.startswith("data: {")
            if events == 60:
                events += 1
                order = {"request_id": "captured"}
                moved = await client.post(f"{served.url}/kvmig/v1/migrations", json=order)
                moved.raise_for_status()
    for name in ("migrate", "sequence", "llm_request"):
        await collector.wait_for(name)
    await asyncio.sleep(1.0)
    found = sorted((one for one in collector.spans if one.trace_id == TRACE), key=lambda x: x.began)
    return [asdict(one) for one in found]


def write_capture(path: Path) -> None:
    """Start a real server of two instances, and write the spans of a call that moves."""
    with tempfile.TemporaryDirectory() as folder, otlp_collector() as collector:
        environment = {
            **collector.environment, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"
        }  # fmt: skip
        flags = [
            *SMALL, "--instances=2", "--served-model-name=count",
            f"--otlp-traces-endpoint=http://127.0.0.1:{collector.port}/v1/traces",
        ]  # fmt: skip
        served = Served(flags, environment=environment, log=Path(folder, "log"))
        served.model = "count"
        with served:
            spans = asyncio.run(capture(served, collector))
    path.write_text(json.dumps(spans, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--before", type=Path, help="checkout of a revision without traces")
    root.add_argument("--capture", type=Path, help="write the spans of a moved call there")
    root.add_argument("--step-ms", type=float, default=6.0, help="time of an engine's step")
    root.add_argument("--streams", type=int, default=64, help="at once")
    root.add_argument("--tokens", type=int, default=256, help="of each answer")
    root.add_argument("--rounds", type=int, default=0, help="0: 2 with --quick, else 10")
    options = root.parse_args(argv)
    if options.capture is not None:
        write_capture(options.capture)
        return 0
    rounds = options.rounds or (2 if options.quick else 10)
    settings: dict[str, Any] = {
        "step_ms": options.step_ms, "streams": options.streams, "tokens": options.tokens,
        "rounds": rounds, "share": SHARE,
    }  # fmt: skip
    result = report.begin("tracing", settings)
    with tempfile.TemporaryDirectory() as folder, otlp_collector() as collector:
        servers = servers_of(options.step_ms, options.before, collector, Path(folder))
        with all_up(list(servers.values())):
            found = uvloop.run(measure(servers, rounds, options.streams, options.tokens))
        result.summary = summarise(found, options.tokens, collector)
    result.samples = [asdict(one) for one in found]
    result.targets = {"on_ratio": {"max": 1.01}, "off_us": {"max": 1.0}}
    columns = tuple(Round.__dataclass_fields__)
    rows = [tuple(asdict(one).values()) for one in found]
    return report.finish(result, options, [report.table("Rounds", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
