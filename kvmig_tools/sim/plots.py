"""Pictures of runs: latencies, memory and instances over time, migrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvmig_tools.sim.run import Finished


def draw(finished: Sequence[Finished], folder: Path) -> list[Path]:
    """Write them into `folder`. Needs matplotlib: raises ImportError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    pictures = {
        "latencies.png": _latencies,
        "time.png": _time,
        "memory.png": _memory,
        "migrations.png": _migrations,
    }
    files = []
    for name, paint in pictures.items():
        figure = paint(pyplot, finished)
        figure.tight_layout()
        files.append(folder / name)
        figure.savefig(files[-1], dpi=110)
        pyplot.close(figure)
    return files


def _label(one: Finished) -> str:
    run = one.result.run
    return f"{run.policy} {run.rate:g}/s" if run.rate else run.policy


def _latencies(pyplot: Any, finished: Sequence[Finished]) -> Any:
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4))
    titles = {"ttft_s": "time to first token", "tpot_s": "time a token", "e2e_s": "end to end"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for one in finished:
            values = np.sort(one.outcomes.column(name))
            if name == "tpot_s":
                values = values[values > 0]
            axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=_label(one))
        axis.set(title=title, xlabel="seconds", ylabel="share of requests", xscale="log")
        axis.grid(visible=True, alpha=0.3)
    axes[-1].legend(frameon=False, fontsize="small", loc="lower right")
    return figure


def _time(pyplot: Any, finished: Sequence[Finished]) -> Any:
    figure, axes = pyplot.subplots(2, 1, figsize=(12, 6), sharex=True)
    for one in finished:
        at, series = one.series.column("time_s"), one.series
        free = series.column("free_blocks") - series.column("queued_blocks")
        axes[0].plot(at, free / np.maximum(series.column("requests"), 1), label=_label(one))
        axes[1].plot(at, series.column("instances"), label=_label(one))
    axes[0].set(ylabel="mean freeness, blocks a request", ylim=(-20, 100))
    axes[1].set(ylabel="instances", xlabel="seconds", ylim=(0, None))
    axes[0].legend(frameon=False, fontsize="small", loc="upper right")
    return figure


def _memory(pyplot: Any, finished: Sequence[Finished]) -> Any:
    figure, axes = pyplot.subplots(
        len(finished), 1, figsize=(12, 2.5 * len(finished)), squeeze=False
    )
    for axis, one in zip(axes[:, 0], finished, strict=True):
        at = one.series.column("time_s")
        axis.plot(at, one.series.column("free_blocks"), label="free, all instances")
        axis.plot(at, one.series.column("head_blocks"), label="wanted by the heads of queues")
        axis.set(title=_label(one), ylabel="KV blocks")
    axes[0][0].legend(frameon=False, fontsize="small", loc="upper right")
    axes[-1][0].set_xlabel("seconds")
    return figure


def _migrations(pyplot: Any, finished: Sequence[Finished]) -> Any:
    figure, axis = pyplot.subplots(figsize=(max(5, 1.2 * len(finished)), 4))
    labels = [_label(one) for one in finished]
    moved = [one.result.figures["migrations"] for one in finished]
    axis.bar(labels, moved, label="moved")
    aborted = [one.result.figures["migrations_aborted"] for one in finished]
    axis.bar(labels, aborted, bottom=moved, label="aborted")
    axis.set(ylabel="migrations")
    axis.tick_params(axis="x", rotation=30)
    axis.legend(frameon=False)
    return figure
