"""Pictures of results."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bench.report import Result

_STYLES = {
    "recompute": ("abort and recompute", "#b3402e", "s"),
    "blocking": ("blocking copy", "#c98a1b", "^"),
    "unspread": ("live, its pause not spread", "#7fb3dc", "v"),
    "live": ("live migration", "#1f6fb2", "o"),
}


def draw_downtime(result: Result, file: Path) -> None:
    """Longest gaps over the prompt's length, a panel a background; least and most as bars."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    backgrounds = sorted({sample["background"] for sample in result.samples})
    figure, axes = pyplot.subplots(
        1, len(backgrounds), figsize=(5 * len(backgrounds), 4), sharey=True, squeeze=False
    )
    for axis, background in zip(axes[0], backgrounds, strict=True):
        here = [sample for sample in result.samples if sample["background"] == background]
        for mode, (label, colour, marker) in _STYLES.items():
            _line(axis, [s for s in here if s["mode"] == mode], "longest_ms", label, colour, marker)
        live = [s for s in here if s["mode"] == "live"]
        _line(axis, live, "quiet_ms", "as long without a move", "#777777", "")
        axis.set(
            title=f"{background} more requests an instance",
            xlabel="prompt, tokens",
            yscale="log",
        )
        axis.grid(visible=True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("longest gap that the client sees, ms")
    axes[0][-1].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _line(
    axis: Any, samples: list[dict[str, Any]], field: str, label: str, colour: str, marker: str
) -> None:
    lengths = sorted({sample["prompt"] for sample in samples})
    values = [[s[field] for s in samples if s["prompt"] == length] for length in lengths]
    middle = [median(one) for one in values]
    spread = [
        [mid - min(one) for mid, one in zip(middle, values, strict=True)],
        [max(one) - mid for mid, one in zip(middle, values, strict=True)],
    ]
    axis.errorbar(
        lengths,
        middle,
        yerr=spread,
        label=label,
        color=colour,
        marker=marker,
        linestyle="-" if marker else "--",
        capsize=2,
        linewidth=1.5,
    )
