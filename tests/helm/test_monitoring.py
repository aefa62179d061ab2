"""Checks 34 and 35: dashboards, alerts and triggers ask for metrics that exist."""

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from api.metrics import Metrics as ApiMetrics
from tests.helm.chart import CHART, Object, render, render_case
from worker.metrics import Metrics as WorkerMetrics

# What other programs of the cluster export.
FOREIGN = {
    "kube_pod_status_phase": "kube-state-metrics",
    "kube_horizontalpodautoscaler_status_desired_replicas": "kube-state-metrics",
    "kube_horizontalpodautoscaler_spec_max_replicas": "kube-state-metrics",
    "keda_scaled_object_errors_total": "KEDA's operator",
}
_NAME = re.compile(r"(?<![\w\"~.])([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?=\{|\[|\)|,| |$)")
_WORDS = {"histogram_quantile", "group_left", "label_values", "count_values"}


def series(registry: CollectorRegistry) -> Iterator[str]:
    """Yield the names that a scrape of this registry can have, before anything has been counted."""
    for collector in registry._collector_to_names:  # pyright: ignore[reportPrivateUsage]
        assert isinstance(collector, MetricWrapperBase)
        (family,) = collector.describe()
        match family.type:
            case "counter":
                yield f"{family.name}_total"
            case "histogram":
                yield from (f"{family.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
            case _:
                yield family.name


API = set(series(ApiMetrics()._registry))  # pyright: ignore[reportPrivateUsage]
WORKER = set(series(WorkerMetrics("m").registry))
KNOWN = API | WORKER | FOREIGN.keys()


def names_of(expression: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\b(?:by|on|ignoring|without) \([^)]*\)", "", expression)
    return set(_NAME.findall(bare)) - _WORDS


def dashboards() -> dict[str, Object]:
    return {path.name: json.loads(path.read_text()) for path in (CHART / "files" / "dashboards").glob("*.json")}


def dashboard_queries() -> list[tuple[str, str]]:
    found = []
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            found += [(f"{name}: {panel['title']}", target["expr"]) for target in panel["targets"]]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                found.append((f"{name}: ${variable['name']}", variable["definition"]))
    return found


def alerts() -> list[Object]:
    (rules,) = render_case("everything").of("PrometheusRule")
    return [rule for group in rules["spec"]["groups"] for rule in group["rules"]]


def test_34_every_metric_of_a_dashboard_an_alert_or_a_trigger_exists() -> None:
    queries = dashboard_queries() + [(alert["alert"], alert["expr"]) for alert in alerts()]
    for scaled in [*render_case("scaling").of("ScaledObject"), *render_case("everything").of("ScaledObject")]:
        for trigger in scaled["spec"]["triggers"]:
            if trigger["type"] == "prometheus":
                queries.append(("trigger", trigger["metadata"]["query"]))
    assert len(queries) > 40
    unknown = {where: names_of(query) - KNOWN for where, query in queries if names_of(query) - KNOWN}
    assert not unknown
    assert [where for where, query in queries if not names_of(query)] == []


def test_34_a_metric_that_does_not_exist_would_be_found() -> None:
    assert names_of('sum by (model) (rate(diffleet_nothing_total{a="b"}[5m])) > 0') == {"diffleet_nothing_total"}
    assert not {"diffleet_nothing_total"} & KNOWN


def test_34_no_name_means_one_thing_in_the_api_and_another_in_the_workers() -> None:
    # A sum over both would count twice. Also not by a suffix: a histogram x has the series x_count.
    assert not API & WORKER
    assert not {name.removesuffix("_total") for name in API} & {name.removesuffix("_total") for name in WORKER}


def test_34_of_the_queue_every_api_process_tells_the_same_so_nothing_is_added_over_them() -> None:
    told = {"diffleet_queue_requests", "diffleet_queue_claimed", "diffleet_queue_age_seconds"}
    told |= {"diffleet_dead_letters", "diffleet_workers_alive"}
    queries = [*dashboard_queries(), *((alert["alert"], alert["expr"]) for alert in alerts())]
    found = [(where, query) for where, query in queries if names_of(query) & told]
    assert len(found) > 6
    for where, query in found:
        for name in names_of(query) & told:
            assert re.search(rf"max(?: by \([^)]*\))? ?\({name}\{{", query), where


def test_34_queries_ask_the_process_that_has_the_metric() -> None:
    for where, query in dashboard_queries():
        for component in re.findall(r'component="(\w+)"', query):
            assert names_of(query) <= {"api": API, "worker": WORKER}[component], where


def test_34_the_monitors_set_the_label_that_the_dashboards_ask_for() -> None:
    rendered = render_case("everything")
    (service,) = rendered.of("ServiceMonitor")
    (pods,) = rendered.of("PodMonitor")
    assert {"targetLabel": "component", "replacement": "api"} in service["spec"]["endpoints"][0]["relabelings"]
    assert {"targetLabel": "component", "replacement": "worker"} in pods["spec"]["podMetricsEndpoints"][0][
        "relabelings"
    ]


def test_34_the_documentation_lists_every_metric_and_no_other() -> None:
    page = (CHART.parents[1] / "docs" / "operations.md").read_text()
    table = page.partition("## Metrics")[2].partition("\n- ")[0]
    documented = re.findall(r"`([a-z_]+)`", table.partition("|---|")[2])
    assert len(set(documented)) == len(documented)
    exported = {re.sub("_(bucket|sum|count)$", "", name) for name in API | WORKER if name.startswith("diffleet_")}
    assert {f"diffleet_{name}" for name in documented} == exported


def test_34_nothing_of_monitoring_is_rendered_unasked() -> None:
    rendered = render_case("default")
    assert not rendered.of("ServiceMonitor", "PodMonitor", "PrometheusRule")
    assert not [one for one in rendered.of("ConfigMap") if "dashboard" in one["metadata"]["name"]]


def test_34_dashboards_arrive_whole_and_small_enough_for_a_config_map() -> None:
    maps = [one for one in render_case("everything").of("ConfigMap") if "dashboard" in one["metadata"]["name"]]
    arrived = {name: json.loads(text) for one in maps for name, text in one["data"].items()}
    assert arrived == dashboards()
    assert all(len(text) < 2**19 for one in maps for text in one["data"].values())
    for one in maps:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"]["grafana_folder"] == "LLM"


@pytest.mark.parametrize("name", dashboards())
def test_34_panels_do_not_overlap_and_have_one_id_each(name: str) -> None:
    panels = dashboards()[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


def test_35_the_alerts_cover_what_can_go_wrong_and_each_has_a_runbook() -> None:
    names = {alert["alert"] for alert in alerts()}
    assert names >= {
        "DiffleetWorkersMissing",
        "DiffleetQueueGrows",
        "DiffleetQueueOld",
        "DiffleetDeadLetters",
        "DiffleetQueueUnreachable",
        "DiffleetFirstBlockSlow",
        "DiffleetGpuPodsPending",
        "DiffleetScalingFails",
        "DiffleetPoolAtCeiling",
        "DiffleetDrainOverruns",
        "DiffleetWritesFenced",
        "DiffleetWorkersCrash",
        "DiffleetRequestsFail",
        "DiffleetRedisErrors",
    }
    page = (CHART / "README.md").read_text()
    for alert in alerts():
        assert f"#### {alert['alert']}\n" in page
        assert alert["annotations"]["runbook"] == f"#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}


def test_35_alerts_look_at_this_release_only() -> None:
    for alert in alerts():
        assert "NAMESPACE" not in alert["expr"] and "PODS" not in alert["expr"]
        assert re.search(r'namespace="prod"', alert["expr"])
    text = render_case("everything").one("ConfigMap", "demo-fleet-alerts")["data"]["diffleet.yaml"]
    assert "demo-fleet-worker-.*" in text and "{{ $labels.model }}" in text


def test_the_default_query_of_the_prometheus_trigger_is_about_this_model() -> None:
    pool = {"model": {"name": "m"}, "scaling": {"enabled": True, "prometheus": {"enabled": True, "serverAddress": "x"}}}
    (scaled,) = render({"redis": {"host": "redis"}, "pools": {"p": pool}}).of("ScaledObject")
    late = scaled["spec"]["triggers"][-1]["metadata"]
    # Without `or vector(0)` a front that cannot reach Redis would have no series, an error that the fallback answers.
    assert late["query"] == 'max(diffleet_queue_age_seconds{model="m"}) or vector(0)'
    assert late["ignoreNullValues"] == "false"
