"""docs/metrics.md matches the output of scripts/metrics_table.py for elastic/agent/metrics.py."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from elastic.agent.metrics import METRICS, Metric, MetricKind

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = REPOSITORY / "scripts" / "metrics_table.py"
    spec = importlib.util.spec_from_file_location("metrics_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_prometheus_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"elastic_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert not re.search(r"_(ms|millis|minutes|hours|kib|mib|percent)(_|$)", metric.name)
    if metric.kind is MetricKind.SUMMARY or "age" in metric.name.split("_"):
        assert metric.name.endswith("_seconds")
    assert not {"rank", "local_rank", "pid", "le", "quantile"} & set(metric.labels)
    assert not metric.values or len(metric.values) == len(metric.labels)


def test_each_name_is_used_once() -> None:
    names = [name for metric in METRICS for name in metric.sample_names]
    assert len(set(names)) == len(names) > 40
