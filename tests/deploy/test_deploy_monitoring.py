"""Alerts and dashboard query metrics that agents export, with their labels and values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from manifests import DEPLOY, IMAGE, INSTANCE, NAME, Object, Rendered, kustomize
from network_rules import allowed
from test_deploy_network import MONITORING, ours

from elastic.agent.metrics import COMMON_LABELS, METRICS, Metric, MetricKind
from elastic.cli import kube

ALERTS = DEPLOY / "components" / "monitoring" / "alerts"
RULES: list[Object] = [
    rule
    for group in yaml.safe_load((ALERTS / "rules.yaml").read_text())["spec"]["groups"]
    for rule in group["rules"]
]
DASHBOARD: Object = json.loads((ALERTS / "elastic.json").read_text())
PANELS: list[Object] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
BY_SAMPLE = {name: metric for metric in METRICS for name in metric.sample_names}
# What Prometheus' operator adds to every series that it scrapes.
TARGET_LABELS = {"namespace", "pod", "container", "job", "instance", "endpoint"}
RESETTABLE = {"rate", "increase", "irate", "resets"}


def queries() -> Iterator[tuple[str, str]]:
    """The location and the expression of every query."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")


QUERIES = tuple(queries())


def nodes_of(expression: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """Every node of a query's syntax tree, with its ancestors."""
    found: list[tuple[Any, tuple[Any, ...]]] = []
    above: list[Any] = []

    def enter(node: Any) -> bool:
        found.append((node, tuple(above)))
        above.append(node)
        return True

    def leave(node: Any) -> bool:
        above.pop()
        return True

    promql.walk(promql.parse(expression), enter, leave)
    return found


def selectors(expression: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """The selectors of a query; a range counts as its selector."""
    found = []
    for node, above in nodes_of(expression):
        if isinstance(node, promql.MatrixSelector):
            found.append((node.vector_selector, (*above, node)))
        elif isinstance(node, promql.VectorSelector) and not (
            above and isinstance(above[-1], promql.MatrixSelector)
        ):
            found.append((node, above))
    return found


def labels_of(metric: Metric, sample: str) -> set[str]:
    le = {"le"} if sample.endswith("_bucket") else set()
    return {*COMMON_LABELS, *metric.labels, *TARGET_LABELS, *le}


def complaints(expression: str) -> list[str]:
    """The errors of a query."""
    found = []
    for selector, above in selectors(expression):
        metric = BY_SAMPLE.get(selector.name)
        if metric is None:
            found.append(f"no metric {selector.name}")
            continue
        known = labels_of(metric, selector.name)
        for matcher in selector.matchers.matchers:
            if matcher.name not in known:
                found.append(f"{selector.name} has no label {matcher.name}")
            elif matcher.name in metric.labels and metric.values:
                values = metric.values[metric.labels.index(matcher.name)]
                is_pattern = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
                asked = matcher.value.split("|") if is_pattern else [matcher.value]
                found += [f"{matcher.name} is never {v}" for v in asked if v not in values]
        calls = {node.func.name for node in above if isinstance(node, promql.Call)}
        grows = metric.kind is not MetricKind.GAUGE
        if grows != bool(calls & RESETTABLE):
            found.append(f"{selector.name}, a {metric.kind.value}, in {calls or 'no function'}")
        for node in above:
            if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                lost = set(node.modifier.labels) - known
                found += [f"by ({label}), which {selector.name} lacks" for label in sorted(lost)]
    return found


@pytest.mark.parametrize(("where", "expression"), QUERIES, ids=[where for where, _ in QUERIES])
def test_queries_use_exported_metrics_only(where: str, expression: str) -> None:
    assert selectors(expression), "it reads nothing"
    assert complaints(expression) == []


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("sum(rate(elastic_step_total[5m]))", "no metric elastic_step_total"),
        ('elastic_node_state{rank="1"}', "no label rank"),
        ('increase(elastic_failures_total{action="exclude"}[1h])', "action is never exclude"),
        ('increase(elastic_hangs_total{action=~"kill|end"}[1h])', "action is never end"),
        ("elastic_failures_total > 0", "a counter, in no function"),
        ("rate(elastic_step[5m])", "a gauge, in"),
        ("sum by (local_rank) (elastic_step)", "by (local_rank)"),
        ("sum by (le) (rate(elastic_etcd_request_seconds_count[5m]))", "by (le)"),
    ],
)
def test_invalid_queries_are_detected(expression: str, said: str) -> None:
    assert any(said in complaint for complaint in complaints(expression))


def test_every_metric_is_on_the_dashboard() -> None:
    asked = {s.name for panel in PANELS for t in panel["targets"] for s, _ in of(t["expr"])}
    unseen = [m.name for m in METRICS if not asked & set(m.sample_names)]
    assert unseen == []


def of(expression: str) -> list[tuple[Any, tuple[Any, ...]]]:
    return selectors(expression.replace("$__rate_interval", "5m"))


def test_alerts_are_grouped_by_job_and_name_it() -> None:
    for rule in RULES:
        for node, above in nodes_of(rule["expr"]):
            if isinstance(node, promql.AggregateExpr):
                assert node.modifier is not None, rule["alert"]
                assert {"namespace", "run_id"} <= set(node.modifier.labels), rule["alert"]
            elif isinstance(node, promql.VectorSelector):
                assert any(isinstance(n, promql.AggregateExpr) for n in above), rule["alert"]
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        text = " ".join(rule["annotations"].values())
        named = set(re.findall(r"\$labels\.(\w+)", text))
        assert named <= kept, (
            f"{rule['alert']}: the annotation's {named - kept} are aggregated away"
        )
        if "{{" in rule["annotations"]["description"]:
            assert {"namespace", "run_id"} <= named, rule["alert"]
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)


# Alerts of a job that trains, or should.
ABOUT_TRAINING = {"ElasticNoProgress", "ElasticNodesMissing", "ElasticNoLeader"}
ABOUT_TRAINING |= {"ElasticCheckpointOld"}


@pytest.mark.parametrize(
    ("state", "silent"),
    [
        # Its agents are parked, and scraped, until the finisher has scaled them to 0.
        ("elastic_job_ended", ABOUT_TRAINING),
        # Its agents wait for `elastic resume`.
        ("elastic_job_stopped", {*ABOUT_TRAINING, "ElasticJobPaused"}),
    ],
)
def test_a_job_that_does_not_train_on_purpose_raises_no_alerts(
    state: str, silent: set[str]
) -> None:
    excluded = f"unless on (namespace, run_id) max by (namespace, run_id) ({state}) == 1"
    assert {rule["alert"] for rule in RULES if excluded in rule["expr"]} == silent


def test_dashboard_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) is panel["title"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_dashboard_query_filters_by_the_selected_job() -> None:
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "namespace", "run_id"}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}", "no data source of our own"
        for target in panel["targets"]:
            for selector, _ in of(target["expr"]):
                matchers = {m.name: m.value for m in selector.matchers.matchers}
                assert matchers["namespace"] == "$namespace", panel["title"]
                assert matchers["run_id"] == "$run_id", panel["title"]
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert legend <= set(re.findall(r"\w+", " ".join(kept))), panel["title"]


# In the cluster ---------------------------------------------------------------------------------


def test_monitoring_adds_dashboard_and_alerts_to_the_job_namespace(
    render: Callable[[str], Rendered],
) -> None:
    got = render("prod+monitoring")
    (rules,) = got.of("PrometheusRule")
    assert [r for g in rules["spec"]["groups"] for r in g["rules"]] == RULES
    (dashboard,) = [
        c for c in got.of("ConfigMap") if "grafana_dashboard" in c["metadata"].get("labels", {})
    ]
    assert json.loads(dashboard["data"]["elastic.json"]) == DASHBOARD
    namespaces = {o["metadata"]["namespace"] for o in (rules, dashboard, *got.of("PodMonitor"))}
    assert namespaces == {"elastic-training"}


@pytest.mark.parametrize("overlay", ["prod", "job", "jobset", "trainer"])
def test_one_of_several_jobs_is_scraped_without_a_second_dashboard(
    render: Callable[[str], Rendered], overlay: str
) -> None:
    got = render(f"several {overlay}")
    (monitor,) = got.of("PodMonitor")
    assert monitor["metadata"]["name"] == "llama-workers"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= got.workers.labels.items()
    assert monitor["spec"]["selector"]["matchLabels"][INSTANCE] == "llama"
    assert not got.of("PrometheusRule")
    assert "elastic.json" not in {key for c in got.of("ConfigMap") for key in c["data"]}
    assert allowed(got.of("NetworkPolicy"), MONITORING, ours("worker", "llama"), 8471)


def test_the_shared_overlay_accepts_the_alerts_of_all_jobs(tmp_path: Path) -> None:
    """As documented in the runbook."""
    deploy = os.path.relpath(DEPLOY, tmp_path.resolve())
    written = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "team",
        "resources": [f"{deploy}/overlays/shared"],
        "components": [f"{deploy}/components/monitoring/alerts"],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(written))
    objects = kustomize(tmp_path)
    (rules,) = (o for o in objects if o["kind"] == "PrometheusRule")
    assert rules["metadata"]["namespace"] == "team"
    assert not [o for o in objects if o["kind"] == "PodMonitor"]


def test_monitoring_objects_get_the_given_labels(tmp_path: Path) -> None:
    flags = (IMAGE, "--with=monitoring", "--label=release=prometheus", f"--output-dir={tmp_path}")
    assert kube.main(["render", *flags]) == 0
    objects = kustomize(tmp_path)
    for kind in ("PodMonitor", "PrometheusRule"):
        (one,) = (o for o in objects if o["kind"] == kind)
        assert one["metadata"]["labels"]["release"] == "prometheus"
        assert one["metadata"]["labels"][NAME] == "elastic"
