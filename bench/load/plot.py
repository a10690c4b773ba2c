"""The picture of `bench.load`."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from bench.report import Result

_COLOURS = {"kvmig": "#1f6fb2", "vllm": "#777777", "kvmig-transformers": "#3a8a4d"}


def draw(result: Result, file: Path) -> None:
    """Tokens delivered and what is added to each, over the tokens offered."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    samples = [one for one in result.samples if "front_ends" in one]
    figure, (delivered, added) = pyplot.subplots(1, 2, figsize=(10, 4))
    for server, count in sorted({(one["server"], one["front_ends"]) for one in samples}):
        here = [s for s in samples if (s["server"], s["front_ends"]) == (server, count)]
        rates = sorted({one["offered"] for one in here})
        style = {
            "color": _COLOURS[server],
            "marker": "o",
            "linestyle": "-" if count == 1 else "--",
            "label": f"{server}, {count} front end{'s' if count > 1 else ''}",
        }
        for axis, field in ((delivered, "delivered"), (added, "added_ms_p99")):
            values = [median(s[field] for s in here if s["offered"] == rate) for rate in rates]
            axis.plot(rates, values, **style)
    streams = result.settings["streams"]
    delivered.set(
        title=f"{streams:,} streams", xlabel="offered, tokens/s", ylabel="delivered, tokens/s"
    )
    added.set(xlabel="offered, tokens/s", ylabel="added, 99th percentile, ms", yscale="log")
    for axis in (delivered, added):
        axis.grid(visible=True, which="major", alpha=0.3)
    delivered.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
