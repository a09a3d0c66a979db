"""The dashboard and the alert rules use only series that a server exposes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import grpc
import pytest
import yaml

from memstream_server.observability import Metrics
from tests.support.pages import ROOT
from tests.support.server import ServerProcess, free_address

BOARD = json.loads((ROOT / "deploy/grafana/memstream.json").read_text("utf-8"))
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text("utf-8"))
PANELS = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in BOARD["panels"]}
ALERTS = {rule["alert"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"]}


def exposed() -> dict[str, set[str]]:
    """Series by name, with their labels."""
    series: dict[str, set[str]] = {}
    collectors = cast("list[Any]", list(Metrics().registry._names_to_collectors.values()))
    for collector in collectors:
        labels = set(collector._labelnames)
        for family in collector.describe():
            kinds = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
            series |= {f"{family.name}{kind}": labels | ({"le"} if kind == "_bucket" else set()) for kind in kinds}
    return series


def asked(expression: str) -> list[tuple[str, set[str]]]:
    """Series names with the labels of their selectors and groupings."""
    selected = [
        (name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces or "")))
        for name, braces in re.findall(r"\b(memstream_\w+)(\{[^}]*\})?", expression)
    ]
    grouped = {one.strip() for each in re.findall(r"by \(([^)]*)\)", expression) for one in each.split(",")}
    return [(name, labels | grouped) for name, labels in selected]


EXPRESSIONS = [*((title, one) for title, each in PANELS.items() for one in each), *ALERTS.items()]


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
def test_alert_expressions_name_existing_series(where: str, expression: str) -> None:
    series = exposed()
    if where == "MemstreamDown":
        assert "up{" in expression  # Prometheus' own
        return
    assert asked(expression)
    for name, labels in asked(expression):
        assert name in series, f"{where}: there is no {name}"
        assert labels <= series[name] | {"instance"}, f"{where}: {name} has no {labels - series[name]}"


def test_a_server_exposes_these_names(tmp_path: Path) -> None:
    """Names in Metrics equal the scraped names in Prometheus."""
    address = free_address()
    with (
        ServerProcess(tmp_path / "data", metrics_listen=address),
        urlopen(f"http://{address}/metrics", timeout=30) as answer,
    ):
        text = answer.read().decode()
    declared = set(re.findall(r"^# TYPE (memstream_\w+) (?:counter|gauge|histogram)$", text, re.M))
    created = {name for name in declared if name.endswith("_created")}
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed()}
    assert declared - created == bases


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {name for each in PANELS.values() for expression in each for name, _ in asked(expression)}
    shown |= {re.sub("_bucket$", suffix, name) for name in shown for suffix in ("_count", "_sum")}
    assert set(exposed()) <= shown


def test_alerts_use_possible_outcomes_and_codes() -> None:
    codes = {one for each in re.findall(r'code=~?"([A-Z_|]+)"', " ".join(ALERTS.values())) for one in each.split("|")}
    assert codes <= {code.name for code in grpc.StatusCode}
    assert len(ALERTS) == len([rule for group in RULES["groups"] for rule in group["rules"]])
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"]
            assert rule["labels"]["severity"] in ("warning", "critical")
