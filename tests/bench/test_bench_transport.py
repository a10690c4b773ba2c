"""The benchmark of transports: its figures, and one run of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import report, transport
from bench.transport import Sample
from kvmig.kvtransfer.transports import nixl

SIZES = [1 << 20, 1 << 22]


def test_the_figures_are_of_the_least_and_the_biggest_size() -> None:
    samples = [
        Sample(name, size, ms * size / SIZES[0] + more, 0.3 * size / 1e6, 0.2 * size / 1e6)
        for name, ms in (("memcpy", 0.1), ("shm", 0.5), ("tcp", 1.0), ("tcp-messages", 2.0))
        for size in SIZES
        for more in (-0.01, 0.0, 0.01)
    ]
    summary, targets = transport.summarise(samples)
    assert summary["shm_latency_ms"] == pytest.approx(0.5)
    assert summary["tcp_gb_s"] == pytest.approx(1.048576)
    assert summary["shm_over_memcpy"] == pytest.approx(0.2)
    assert summary["shm_over_tcp"] == pytest.approx(2.0)
    assert summary["tcp_source_gb_per_core_s"] == pytest.approx(1e3 / 300)
    assert summary["tcp-messages_source_gb_per_core_s"] == pytest.approx(1e3 / 300)
    assert "tcp-messages_source_gb_per_core_s" not in targets
    assert report.missed(summary, targets) == []


def test_what_arrives_is_measured_and_the_missing_are_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "REPEATS", 2)
    monkeypatch.setattr(nixl, "MODULES", ("nixl_of_nobody._api",))
    samples = transport.run(["shm", "tcp", "tcp-messages", "tcp-large", "nixl"], SIZES)
    assert [(one.transport, one.nbytes) for one in samples] == [
        (name, size)
        for name in ("memcpy", "shm", "tcp", "tcp-messages", "tcp-large")
        for size in SIZES
        for _ in range(2)
    ]
    assert "nixl is left out: NIXL is not installed" in capsys.readouterr().err
    assert len(transport.tables(samples)) == 1
    result = replace(report.begin("transport", {}), samples=[asdict(one) for one in samples])
    transport.draw(result, tmp_path / "transport.png")
    assert (tmp_path / "transport.png").read_bytes().startswith(b"\x89PNG")
