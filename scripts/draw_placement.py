"""Draw docs/placement.svg: the plan of examples/placement.toml without and with replicas."""

from __future__ import annotations

import sys
from pathlib import Path

from kvmig.placement.__main__ import placed
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.problem import GpuUnit, cluster_of, models_of
from scripts.draw_processes import BLUE, GREEN, INK, LINE, PAPER, SOFT, keep, text

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "placement.svg"
EXAMPLE = ROOT / "examples" / "placement.toml"
GPU, ROW, LEFT, GAP = 104, 30, 20, 6


def drawing() -> str:
    """The whole picture: a row a method, a column a GPU."""
    models = models_of(EXAMPLE.read_text(encoding="utf-8"), EXAMPLE.name)
    estimator = PlanEstimator(models, cluster_of("1x8:a100-80g"), "slo")
    shapes: list[str] = []
    top = 20.0
    for method, what in (("muxserve", "one instance a model"), ("kvmig", "with replicas")):
        plan = placed(estimator, method)
        served = sum(one.throughput for unit in plan for one in estimator.unit(unit) or ())
        offered = sum(one.rate for one in models)
        heading = f"--method {method}: {what}, {served:.3g} of {offered:.3g} requests per second"
        shapes.append(text(LEFT, top + 14, heading, size=15, bold=True, anchor="start"))
        height = 26 + ROW * max(len(unit.members) for unit in plan)
        at = float(LEFT)
        for unit in plan:
            shapes.append(_unit(estimator, unit, at, top + 26, height))
            at += unit.gpus * GPU
        top += height + 62
    width = LEFT * 2 + 8 * GPU
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top:g}" '
        f'font-family="system-ui, sans-serif"><rect width="{width}" height="{top:g}" rx="12" '
        f'fill="{PAPER}"/>{"".join(shapes)}</svg>\n'
    )


def _unit(estimator: PlanEstimator, unit: GpuUnit, x: float, y: float, height: float) -> str:
    width = unit.gpus * GPU - GAP
    fill = BLUE if unit.members else PAPER
    shapes = [
        f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height:g}" rx="8" fill="{fill}" '
        f'stroke="{LINE[BLUE]}"/>',
        text(x + width / 2, y + 17, f"{unit.gpus} GPU" + "s" * (unit.gpus > 1), size=12, ink=SOFT),
    ]
    for row, member in enumerate(unit.members):
        top = y + 24 + row * ROW
        name = estimator.models[member.llm].name
        shapes.append(
            f'<rect x="{x + 6:g}" y="{top:g}" width="{width - 12}" height="{ROW - 6}" rx="5" '
            f'fill="{GREEN}" stroke="{LINE[GREEN]}"/>'
        )
        words = f"{name} {member.rate:.3g}/s"
        shapes.append(text(x + width / 2, top + 17, words, size=12, ink=INK))
    return "".join(shapes)


if __name__ == "__main__":
    sys.exit(keep(str(__doc__), {TARGET: drawing}))
