"""The picture of bench.soak."""

from __future__ import annotations

from pathlib import Path

from bench.report import Result

PANELS = (("rss_mib", "resident memory, MiB"), ("fds", "open files"), ("threads", "threads"))
COLOURS = {
    "launcher": "#555555",
    "fork-server": "#999999", "scheduler": "#c98a1b", "front-end": "#b3402e", "instance": "#1f6fb2",
}  # fmt: skip


def draw_soak(result: Result, file: Path) -> None:
    """A line a process over the minutes, by its part; below them the cluster."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    processes = [one for one in result.samples if "pid" in one]
    cluster = [one for one in result.samples if "shm_mib" in one]
    figure, axes = pyplot.subplots(len(PANELS) + 1, 1, figsize=(9, 10), sharex=True)
    for axis, (field, label) in zip(axes, PANELS, strict=False):
        for pid in dict.fromkeys(one["pid"] for one in processes):
            rows = [one for one in processes if one["pid"] == pid]
            minutes = [one["at_s"] / 60 for one in rows]
            colour = COLOURS[rows[0]["part"]]
            axis.plot(minutes, [one[field] for one in rows], color=colour, linewidth=1.2)
        axis.set(ylabel=label, ylim=(0, None))
        axis.grid(visible=True, alpha=0.3)
    minutes = [one["at_s"] / 60 for one in cluster]
    last = axes[-1]
    last.plot(minutes, [one["blocks_used"] for one in cluster], color="#2f7d4f", label="KV blocks")
    last.plot(minutes, [100 * one["instances"] for one in cluster], color="#777777",
              label="instances, x 100")  # fmt: skip
    last.set(xlabel="minutes", ylabel="in use", ylim=(0, None))
    last.grid(visible=True, alpha=0.3)
    last.legend(frameon=False, fontsize="small")
    for part, colour in COLOURS.items():
        axes[0].plot([], [], color=colour, label=part)
    axes[0].legend(frameon=False, fontsize="small", ncols=len(COLOURS))
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
