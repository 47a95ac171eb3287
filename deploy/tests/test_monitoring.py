"""Prometheus in the fleet, and what the dashboard asks of it; `.ci/compose` starts both and runs this."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.tests.fleet import Fleet, eventually
from rollgym import RemoteEnv

DEPLOY = Path(__file__).parents[1]
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "rollgym.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
METRIC = re.compile(r"\b(?:rollgym|process)_\w+")


@pytest.fixture(scope="module")
def scraped(fleet: Fleet) -> Iterator[dict[str, Any]]:
    """What Prometheus knows of the metrics of a gateway and two nodes that are played on."""
    fleet.scale(2)

    def targets() -> list[tuple[str, str]]:
        found = fleet.prometheus("/api/v1/targets")["activeTargets"]
        return sorted((target["labels"]["job"], target["health"]) for target in found)

    expected = [("gateway", "up"), ("nodes", "up"), ("nodes", "up"), ("sandbox", "up")]
    assert eventually(lambda: targets() == expected), targets()
    env = RemoteEnv(fleet.url, "FrozenLake-v0", {"size": 4}, token=fleet.token)
    for _ in range(2):  # a rate takes two scrapes
        for seed in range(20):
            env.reset(seed=seed)
            env.step("Right")
        before = _last_scrape(fleet)
        assert eventually(lambda before=before: _last_scrape(fleet) > before)
    yield fleet.prometheus("/api/v1/metadata")
    env.close()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_the_dashboard_gives_data(fleet: Fleet, scraped: dict[str, Any], query: str) -> None:
    # A query that is empty as long as nothing goes wrong still asks for what servers have.
    assert _metrics(query) <= scraped.keys() | {"up"}
    query = query.replace("$__rate_interval", "5m").replace("$env_id", ".*")
    assert "$" not in query
    assert fleet.prometheus("/api/v1/query", query=query)["result"]


def test_the_alerts_ask_for_what_servers_have_and_none_is_broken(
    fleet: Fleet, scraped: dict[str, Any]
) -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    (loaded,) = fleet.prometheus("/api/v1/rules")["groups"]
    assert [rule["name"] for rule in loaded["rules"]] == [rule["alert"] for rule in group["rules"]]
    for rule in loaded["rules"]:
        assert rule["health"] == "ok", rule
        assert _metrics(rule["query"]) <= scraped.keys()


def _metrics(query: str) -> set[str]:
    return {re.sub("_(bucket|sum|count)$", "", name) for name in METRIC.findall(query)}


def _last_scrape(fleet: Fleet) -> float:
    """When the server that is scraped last was scraped."""
    (sample,) = fleet.prometheus("/api/v1/query", query="min(timestamp(up))")["result"]
    return float(sample["value"][1])
