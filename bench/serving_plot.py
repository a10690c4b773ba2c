"""The picture of bench.serving."""

from __future__ import annotations

from pathlib import Path

from bench.report import Result

PANELS = (
    ("ttft_ms", "to the first token, ms"),
    ("tpot_ms", "a later token, ms"),
    ("e2e_ms", "to the last token, ms"),
)


def draw_serving(result: Result, file: Path) -> None:
    """The share of calls that took at most so long, all repeats together, a line a policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    answers = [sample for sample in result.samples if sample["kind"] == "answer"]
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4.5 * len(PANELS), 4), sharey=True)
    for axis, (field, label) in zip(axes, PANELS, strict=True):
        for policy in dict.fromkeys(answer["policy"] for answer in answers):
            values = sorted(
                answer[field]
                for answer in answers
                if answer["policy"] == policy and answer[field] is not None
            )
            shares = [(at + 1) / len(values) for at in range(len(values))]
            axis.step(values, shares, where="post", label=policy, linewidth=1.5)
        axis.set(xlabel=label, xscale="log", ylim=(0, 1))
        axis.grid(visible=True, which="major", alpha=0.3)
    axes[0].set_ylabel("share of calls")
    axes[-1].legend(frameon=False, fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
