"""Dashboards as Grafana's JSON, by Grafana's foundation SDK."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueGraphMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    GridPos,
    VariableOption,
    VariableRefresh,
)

from scripts.monitoring.panels import BoardSpec, PanelSpec

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
ANCHORS = {"model": "kvmig_model_state", "worker": "kvmig_gpu_memory_bytes"}
"""Metrics that list the values of a variable."""
COLUMNS = 24
"""The width of Grafana's grid."""
NUMBER, PLOT = (4, 4), (12, 8)
"""Width and height of panels."""

LAST = common.ReduceDataOptions().calcs(["lastNotNull"])
ALL_SERIES = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)

Panel = timeseries.Panel | stat.Panel | bargauge.Panel


def json_of(spec: BoardSpec) -> str:
    """The text of a dashboard's file."""
    found = (
        dashboard.Dashboard(spec.title)
        .uid(spec.uid)
        .description(spec.description)
        .tags(["kvmig"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for name in spec.variables:
        found = found.with_variable(variable(name))
    for number, (panel, at) in enumerate(zip(spec.panels, places(spec.panels), strict=True), 1):
        found = found.with_panel(drawn(panel).grid_pos(at).id(number))
    return JSONEncoder(sort_keys=True, indent=2).encode(found.build()) + "\n"


def variable(label: str) -> dashboard.QueryVariable:
    """Lets a dashboard be narrowed to values of a label."""
    return (
        dashboard.QueryVariable(label)
        .label(label.capitalize())
        .datasource(SOURCE)
        .query(f"label_values({ANCHORS[label]}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def drawn(spec: PanelSpec) -> Panel:
    """A panel with its queries."""
    found: Panel
    if spec.kind == "number":
        found = stat.Panel().reduce_options(LAST).graph_mode(BigValueGraphMode.NONE)
    elif spec.kind == "bars":
        found = (
            bargauge.Panel()
            .orientation(VizOrientation.HORIZONTAL)
            .display_mode(BarGaugeDisplayMode.BASIC)
            .reduce_options(LAST)
            .min(0)
        )
    else:
        found = timeseries.Panel().fill_opacity(10).min(0).tooltip(ALL_SERIES)
    found = found.title(spec.title).datasource(SOURCE).unit(spec.unit)
    if spec.description:
        found = found.description(spec.description)
    for number, query in enumerate(spec.queries):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(query.expr)
        if query.legend:
            target = target.legend_format(query.legend)
        found = found.with_target(target.instant() if spec.kind == "bars" else target.range())
    return found


def places(panels: tuple[PanelSpec, ...]) -> Iterator[GridPos]:
    """Where panels are: from left to right, then from top to bottom."""
    x = y = row = 0
    for spec in panels:
        width, height = NUMBER if spec.kind == "number" else PLOT
        if x + width > COLUMNS or (row and height != row):
            x, y = 0, y + row
        row = height
        yield GridPos(h=height, w=width, x=x, y=y)
        x += width
