"""Converts boards to Grafana's JSON, with Grafana's own types.

Needs grafana-foundation-sdk and Python 3.11. All panels query the data source in the dashboard's variable, so
one file fits every installation. Links lead to the runbook of an alert, and to traces and logs of the job if data
sources for them are selected."""

from __future__ import annotations

import json
import urllib.parse
import warnings
from typing import Any

from dashboards.generator.panels import Board, GridPlace, Panel, places
from dashboards.generator.queries import JOB, fold, select, stepped
from dashboards.generator.rules import ALERTS, RUNBOOKS_UID, runbook_place
from resilience.telemetry.dashboard_files import DATASOURCE, json_text

with warnings.catch_warnings():
    # The SDK warns about a newer dashboard format, which Grafana before 12 cannot read.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import (
        bargauge,
        dashboard,
        heatmap,
        prometheus,
        stat,
        table,
        text,
        timeseries,
    )
    from grafana_foundation_sdk.builders import common as common_builders
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common
    from grafana_foundation_sdk.models import dashboard as model
    from grafana_foundation_sdk.models import prometheus as prometheus_model
    from grafana_foundation_sdk.models import text as text_model

TAG = "resilience"
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TO_JOB = {
    "title": "Overview of the job",
    "url": "/d/resilience-overview?var-job=${__data.fields.job_id:percentencode}",
}
ROOM = 4  # height for a runbook's heading

# Metrics have the name of the run as label, such as job@1; spans and log lines have the job's id.
ID_OF_RUN = "/^([^@]*)/"
LOGS = '{service_name="resilience", job_id="$id"} | json'

# The series and the label from which each variable takes its values.
VARIABLES = {
    "job": ("resilience_job_info", "job_id"),
    "node": (select("resilience_monitor_up", scope=(JOB,)), "node"),
}
_restarts = stepped("resilience_restart_iterations_total", 'outcome="interrupted"', by=("layer", "node"))
_firing = select("ALERTS", 'alertstate="firing"', scope=(JOB,))
ANNOTATIONS = {
    "Restarts": f"{fold('max', ('layer',), _restarts)} > 0",
    "Alerts": f"max by (alertname, severity) ({_firing})",
}


def board_json(board: Board, others: tuple[Board, ...]) -> str:
    """Return a dashboard as Grafana's JSON. datasource: name of the default Prometheus. matchers: label matchers for
    all selectors."""
    built = _dashboard(board.title, board.uid, board.description)
    for variable in _variables(board.is_of_one_job):
        built.with_variable(variable)
    for annotation in _annotations() if board.is_of_one_job else ():
        built.annotation(annotation)
    for link in _links(others, board.is_of_one_job):
        built.link(link)
    number = 0
    for row, (heading, panel_places) in zip(board.rows, places(board), strict=True):
        number += 1
        built.with_row(dashboard.Row(row.title).id(number).grid_pos(_grid(heading)))
        for panel, place in zip(row.panels, panel_places, strict=True):
            number += 1
            built.with_panel(_panel(panel, board.is_of_one_job).id(number).grid_pos(_grid(place)))
    content = json.loads(_text(built))
    for panel, panel_json in zip(
        board.panels(), [candidate for candidate in content["panels"] if candidate["type"] != "row"], strict=True
    ):
        if panel.leads_to_job:
            panel_json["fieldConfig"]["defaults"]["links"] = [_TO_JOB]
    return json_text(content)


def runbooks_json() -> str:
    """Return the dashboard with the runbooks, so that links to them work in any Grafana."""
    built = _dashboard("Resilience / Runbooks", RUNBOOKS_UID, "What each alert means, what to look at, what to do.")
    y = 0
    for alert in ALERTS:
        content = alert.runbook.markdown()
        height = ROOM + content.count("\n") // 2 + len(content) // 160
        panel = text.Panel().title(alert.name).description(alert.summary).mode(text_model.TextMode.MARKDOWN)
        panel.content(content).id(runbook_place(alert.name)).grid_pos(_grid(GridPlace(0, y, 24, height)))
        built.with_panel(panel)
        y += height
    return _text(built)


def _dashboard(title: str, uid: str, description: str) -> dashboard.Dashboard:
    built = dashboard.Dashboard(title).uid(uid).description(description).tags([TAG]).timezone("browser")
    built.editable().tooltip(model.DashboardCursorSync.CROSSHAIR).refresh("30s").time("now-6h", "now")
    return built


def _text(built: dashboard.Dashboard) -> str:
    content = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    # Remove keys that the builders add beyond Grafana's schema.
    for variable in content.get("templating", {}).get("list", ()):
        for key in ("auto", "auto_count", "auto_min"):  # only interval variables have them
            variable.pop(key, None)
    return json_text(content)


def _grid(place: GridPlace) -> model.GridPos:
    return model.GridPos(h=place.h, w=place.w, x=place.x, y=place.y)


# -- around the panels --------------------------------------------------------------------------------


def _variables(is_of_one_job: bool) -> list[Any]:
    jobs, nodes = (f"label_values({selector}, {label})" for selector, label in VARIABLES.values())
    ids = f"label_values({select(VARIABLES['job'][0], scope=(JOB,))}, job_id)"
    chosen = model.VariableOption(selected=True, text=DATASOURCE, value=DATASOURCE)
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus").current(chosen)
    if not is_of_one_job:
        return [source]
    return [
        source,
        _query_variable("job", "Job", jobs).sort(model.VariableSort.NATURAL_DESC),
        _query_variable("id", "Job id", ids).regex(ID_OF_RUN).hide(model.VariableHide.HIDE_VARIABLE),
        _query_variable("node", "Node", nodes)
        .sort(model.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(selected=True, text=["All"], value=["$__all"])),
        dashboard.DatasourceVariable("traces").label("Traces").type("tempo"),
        dashboard.DatasourceVariable("logs").label("Logs").type("loki"),
    ]


def _query_variable(name: str, label: str, query: str) -> Any:
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE)
    # Find jobs that have ended within the displayed range too.
    variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.query({"qryType": 1, "query": query, "refId": f"variable-{name}"})


def _annotations() -> list[Any]:
    return [
        _annotation("Restarts", "blue", "{{layer}} restarts", "layer"),
        _annotation("Alerts", "red", "{{alertname}} ({{severity}})", "alertname"),
    ]


def _annotation(name: str, color: str, title: str, keys: str) -> Any:
    annotation = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color)
    query = prometheus.Dataquery().expr(ANNOTATIONS[name]).ref_id("Anno").range().datasource(SOURCE)
    return annotation.target(query).title_format(title).tag_keys(keys)


def _links(others: tuple[Board, ...], is_of_one_job: bool) -> list[Any]:
    links = [_link("Resilience", "").type(model.DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)]
    links += [_link(board.title.rpartition("/ ")[2], f"/d/{board.uid}") for board in others]
    if not is_of_one_job:
        return links
    traceql = '{ span.resilience.job.id = "$id" && name = "restart" }'
    links.append(_link("Traces", _explore("traces", {"query": traceql, "queryType": "traceql"})))
    links.append(_link("Logs", _explore("logs", {"expr": LOGS})))
    return links


def _link(title: str, url: str) -> Any:
    link = dashboard.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url).icon("external link")
    return link.keep_time(True).include_vars(not url.startswith("/explore"))


def _explore(source: str, query: dict[str, str]) -> str:
    """Return a link to Grafana's Explore. Its variables stay unescaped, so that Grafana replaces them."""
    pane = {
        "datasource": f"${{{source}}}",
        "queries": [{"refId": "A", "datasource": {"uid": f"${{{source}}}"}, **query}],
        "range": {"from": "${__from}", "to": "${__to}"},
    }
    return "/explore?schemaVersion=1&panes=" + urllib.parse.quote(json.dumps({"a": pane}), safe="${}:,")


# -- panels -------------------------------------------------------------------------------------------


def _panel(panel: Panel, is_of_one_job: bool) -> Any:
    built = _VIEWS[panel.view](panel)
    built.title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit).min(0)
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        if query.legend:
            target.legend_format(query.legend)
        if panel.view in ("stat", "table", "gauge"):
            target.instant()
        else:
            target.range()
        if panel.view == "table":
            target.format(prometheus_model.PromQueryFormat.TABLE)
        elif panel.view == "heatmap":
            target.format(prometheus_model.PromQueryFormat.HEATMAP)
        built.with_target(target.exemplar(panel.has_exemplars))
    if panel.maximum is not None:
        built.max(panel.maximum)
    if panel.empty:
        built.no_value(panel.empty)
    if panel.steps:
        steps = [model.Threshold(value=value, color=color) for value, color in panel.steps]
        built.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    links = []
    if is_of_one_job:
        links.append(_panel_link("Logs of the job", _explore("logs", {"expr": LOGS})))
    if panel.runbook:
        links.insert(0, _panel_link(f"Runbook: {panel.runbook}", runbook_path(panel.runbook)))
    return built.links(links)


def _panel_link(title: str, url: str) -> Any:
    return dashboard.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url).target_blank(True)


def runbook_path(alert: str) -> str:
    """Return the path of an alert's runbook in Grafana."""
    return f"/d/{RUNBOOKS_UID}/runbooks?viewPanel={runbook_place(alert)}"


def _stat(panel: Panel) -> Any:
    reduce = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    mode = common.BigValueColorMode.BACKGROUND_SOLID if panel.steps else common.BigValueColorMode.NONE
    return stat.Panel().reduce_options(reduce).color_mode(mode).graph_mode(common.BigValueGraphMode.NONE)


def _lines(panel: Panel) -> Any:
    legend = common_builders.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST)
    tooltip = common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
    legend.placement(common.LegendPlacement.BOTTOM)
    return timeseries.Panel().legend(legend).tooltip(tooltip.sort(common.SortOrder.DESCENDING)).line_width(1)


def _stacked(panel: Panel) -> Any:
    stacking = common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
    return _lines(panel).stacking(stacking).fill_opacity(30)


def _bars(panel: Panel) -> Any:
    return _stacked(panel).draw_style(common.GraphDrawStyle.BARS).fill_opacity(80)


def _table(panel: Panel) -> Any:
    hidden = {"id": "organize", "options": {"excludeByName": {"Time": True}}}
    steps = [hidden] if len(panel.queries) == 1 else [{"id": "merge", "options": {}}, hidden]
    return table.Panel().transformations(
        [model.DataTransformerConfig(id_val=str(step["id"]), options=step["options"]) for step in steps]
    )


def _heatmap(panel: Panel) -> Any:
    return heatmap.Panel().calculate(False).show_legend().exemplars_color("rgba(255,0,255,0.7)")


def _gauge(panel: Panel) -> Any:
    reduce = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    return bargauge.Panel().reduce_options(reduce).orientation(common.VizOrientation.HORIZONTAL)


_VIEWS = {
    "stat": _stat,
    "lines": _lines,
    "stacked": _stacked,
    "bars": _bars,
    "table": _table,
    "heatmap": _heatmap,
    "gauge": _gauge,
}
