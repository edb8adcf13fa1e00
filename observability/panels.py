"""What the boards share: the data source and the variables, panels in one look, and the PromQL that is easy to get
wrong.

Every panel, target, annotation and query variable names the data source by variable: a board that carries the uid of
one Grafana is empty, without an error, in every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Panel = timeseries.Panel | heatmap.Panel | stat.Panel
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
BUILT_IN = DataSourceRef(type_val="grafana", uid="-- Grafana --")
WINDOW = "$__rate_interval"
WIDTH, HEIGHT = 8, 8
"""Three panels a row; Grafana's grid is 24 wide."""


@dataclass(frozen=True)
class Query:
    """``legend`` is Grafana's template: {{label}}."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Style:
    """Exceptions from the look of a panel, for the series of one name."""

    series: str
    color: str = ""
    dashed: bool = False
    """A line of reference: not stacked, not filled."""

    def properties(self) -> list[DynamicConfigValue]:
        found = []
        if self.color:
            found.append(DynamicConfigValue("color", {"mode": "fixed", "fixedColor": self.color}))
        if self.dashed:
            found += [
                DynamicConfigValue("custom.stacking", {"mode": "none"}),
                DynamicConfigValue("custom.fillOpacity", 0),
                DynamicConfigValue("custom.lineWidth", 2),
                DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
            ]
        return found


# -- PromQL


def series(metric: str, select: str, *more: str) -> str:
    return f"{metric}{{{', '.join((select, *more))}}}"


def rate(metric: str, select: str, *more: str) -> str:
    return f"rate({series(metric, select, *more)}[{WINDOW}])"


def quantile(q: float, histogram: str, select: str, by: str) -> str:
    """Buckets are added up before the quantile is taken: quantiles of several pods cannot be."""
    return f"histogram_quantile({q}, sum by (le, {by}) ({rate(f'{histogram}_bucket', select)}))"


def share(part: str, whole: str, by: str, keep: str = "") -> str:
    """``part`` of ``whole``, both added up by the labels ``by``, and the part by ``keep`` too.

    A label that only one side has must be on neither side of the match, or each value is divided by itself and every
    share is 1.
    """
    if not keep:
        return f"sum by ({by}) ({part}) / sum by ({by}) ({whole})"
    apart = ", ".join(label for label in (by, keep) if label)
    return f"sum by ({apart}) ({part}) / on ({by}) group_left () sum by ({by}) ({whole})"


# -- panels


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    styles: Sequence[Style] = (),
    stacked: bool = False,
    top: float | None = None,
) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .span(WIDTH)
        .height(HEIGHT)
        .line_width(0 if stacked else 1)
        .fill_opacity(80 if stacked else 10)
        .show_points(looks.VisibilityMode.AUTO)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .placement(looks.LegendPlacement.BOTTOM)
            .display_mode(looks.LegendDisplayMode.LIST)
        )
        .tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.NONE))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel.max(top)
    for style in styles:
        panel.override_by_name(style.series, style.properties())
    for ref, query in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(_target(ref, query).legend_format(query.legend))
    return panel


def heat(title: str, description: str, unit: str, histogram: str, select: str) -> heatmap.Panel:
    """A histogram over time; each column counts what was observed between two points of the graph."""
    query = Query(f"sum by (le) (increase({series(f'{histogram}_bucket', select)}[{WINDOW}]))", "{{le}}")
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("short")
        .span(WIDTH)
        .height(HEIGHT)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit("short"))
        .show_legend()
        .with_target(_target("A", query).legend_format(query.legend).format(PromQueryFormat.HEATMAP))
    )


def names(title: str, description: str, query: Query) -> stat.Panel:
    """The legends of the series that are there now: for metrics whose labels are the message."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("short")
        .span(WIDTH)
        .height(HEIGHT)
        .text_mode(looks.BigValueTextMode.NAME)
        .color_mode(looks.BigValueColorMode.NONE)
        .graph_mode(looks.BigValueGraphMode.NONE)
        .orientation(looks.VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .with_target(_target("A", query).legend_format(query.legend))
    )


def _target(ref: str, query: Query) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(ref).expr(query.expr).range().datasource(DATASOURCE)


# -- variables


def datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def choice(name: str, label: str, values: str, many: bool = False) -> dashboard.QueryVariable:
    """Values of a label. ``many``: several can be chosen, and all are until somebody does."""
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values({values}, {name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NUMERICAL_ASC if many else VariableSort.ALPHABETICAL_ASC)
    )
    return variable.multi(True).include_all(True).all_value(".*") if many else variable


def built_in_annotations() -> dashboard.AnnotationQuery:
    """Grafana adds these to every board; written down, so that a saved board does not differ from the shipped one."""
    return (
        dashboard.AnnotationQuery()
        .name("Annotations & Alerts")
        .datasource(BUILT_IN)
        .built_in(1)
        .enable(True)
        .hide(True)
        .icon_color("rgba(0, 211, 255, 1)")
        .type("dashboard")
    )


def marks(name: str, expr: str, color: str) -> dashboard.AnnotationQuery:
    """Vertical lines wherever the expression has a value."""
    return dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(color).expr(expr)
