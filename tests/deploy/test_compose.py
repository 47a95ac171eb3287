"""What a fleet is deployed with fits the package; that it runs is tested by `.ci/compose`."""

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.make_tokens import make_tokens
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import Caller, Tokens, add_token
from rollgym.env_server.common.settings_loading import load_settings
from rollgym.sandbox.containers.seccomp import build_profile
from tests.support.client_server import ServerProcess

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())


def test_an_image_is_built_from_all_packages_and_from_nothing_else():
    floors = {link.name for link in (ROOT / "rollgym").iterdir() if link.is_symlink()}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    assert lines[lines.index("*") :][0] == "*"
    assert {name for name in let_through if (ROOT / name).is_dir()} == {"rollgym", *floors}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= let_through


@pytest.mark.parametrize("name", ["gateway", "node", "sandbox/server"])
def test_the_settings_of_the_fleet_are_settings(name):
    settings = load_settings({}, ROOT / "deploy" / f"{name}.yaml")
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    assert settings.token_file == Path("/run/tokens/tokens.yaml")


def test_tokens_are_made_once_and_each_opens_what_it_is_for(tmp_path):
    for name in ("gateway", "nodes", "registrar", "prometheus", "sandbox", "trainer"):
        (tmp_path / name).mkdir()
    # What an interrupted start has left.
    add_token(tmp_path / "nodes" / "tokens.yaml", "gateway", ["play"])
    add_token(tmp_path / "gateway" / "new.yaml", "trainer", ["play"])
    assert make_tokens(tmp_path)
    made = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.glob("*/*")}
    holders = {
        server: {
            path: tuple(caller.roles)
            for path, token in made.items()
            if (caller := _caller(tmp_path / server / "tokens.yaml", token)) is not None
        }
        for server in ("gateway", "nodes", "sandbox")
    }
    assert holders == {
        "gateway": {
            "trainer/token": ("play",),
            "nodes/register": ("register",),
            "registrar/token": ("register",),
            "prometheus/gateway": ("admin",),
        },
        "nodes": {"nodes/play": ("play",), "prometheus/nodes": ("admin",)},
        "sandbox": {"nodes/sandbox": ("play",), "prometheus/sandbox": ("admin",)},
    }
    assert sorted(made) == sorted(
        path for server, known in holders.items() for path in (*known, f"{server}/tokens.yaml")
    )
    readable = {path for path in made if (tmp_path / path).stat().st_mode & 0o077}
    assert readable == {"prometheus/gateway", "prometheus/nodes", "prometheus/sandbox"}

    assert not make_tokens(tmp_path)
    assert made == {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.glob("*/*")}


def _caller(file: Path, token: str) -> Caller | None:
    try:
        return Tokens.load(file).caller(token.strip())
    except ProblemError:
        return None


def test_every_file_that_the_fleet_mounts_exists():
    mounted = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", ())]
    files = [volume.split(":")[0] for volume in mounted if volume.startswith("./")]
    assert len(files) >= 5
    for file in files:
        assert (ROOT / file).exists(), file


def test_containers_have_longer_to_stop_than_servers_have_to_drain():
    for service, name in (("gateway", "gateway"), ("environments", "node"), ("sandbox", "sandbox/server")):
        drain_s = load_settings({}, ROOT / "deploy" / f"{name}.yaml").drain_grace_s
        assert int(COMPOSE["services"][service]["stop_grace_period"].removesuffix("s")) > drain_s + 10


def test_the_dashboard_is_drawn_from_the_provisioned_data_source():
    directory = ROOT / "deploy" / "grafana"
    dashboard = json.loads((directory / "dashboards" / "rollgym.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels:
        assert panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
    provider = yaml.safe_load((directory / "provisioning" / "dashboards" / "rollgym.yaml").read_text())
    path = provider["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{path}:ro" in COMPOSE["services"]["grafana"]["volumes"]
    source = yaml.safe_load((directory / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    assert set(COMPOSE["services"]["grafana"]["networks"]) & set(
        COMPOSE["services"]["prometheus"]["networks"]
    )


def test_no_container_may_speak_to_docker():
    for service in COMPOSE["services"].values():
        assert not any("docker" in volume for volume in service.get("volumes", ()))
        assert "privileged" not in service


def test_the_sandbox_has_the_seccomp_profile_that_the_package_makes():
    file = ROOT / "deploy" / "sandbox" / "seccomp.json"
    assert json.loads(file.read_text()) == build_profile(namespaces=True), (
        "python -m rollgym.sandbox.containers.seccomp > deploy/sandbox/seccomp.json"
    )
    assert f"seccomp:./{file.relative_to(ROOT)}" in COMPOSE["services"]["sandbox"]["security_opt"]


def test_nodes_ask_the_sandbox_of_the_fleet():
    node = load_settings({}, ROOT / "deploy" / "node.yaml")
    assert node.sandbox == "remote:http://sandbox:8000?token_file=/run/tokens/sandbox"
    assert not node.runs_code
    served = load_settings({}, ROOT / "deploy" / "sandbox" / "server.yaml")
    assert (served.sandbox, served.runs_code, served.builtin) == ("namespaces", True, False)
    shared = set(COMPOSE["services"]["sandbox"]["networks"])
    assert shared < set(COMPOSE["services"]["environments"]["networks"])


def _probe(service: str, old_port: int, port: int) -> int:
    """The exit code of a service's health check, asked of another port of this machine."""
    kind, *command = COMPOSE["services"][service]["healthcheck"]["test"]
    assert kind == "CMD"
    words = [word.replace("$$", "$").replace(f"/{old_port}", f"/{port}") for word in command]
    return subprocess.run(words, timeout=30, check=False, capture_output=True).returncode


def test_the_health_check_asks_a_server_whether_it_is_ready_and_starts_no_interpreter():
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    with ServerProcess([]) as server:
        for service in ("gateway", "environments", "sandbox"):
            assert _probe(service, 8000, server.port) == 0
        assert _probe("guess", 9000, server.port) != 0, "no /spec is there"
    assert _probe("gateway", 8000, closed) != 0
    tested = [
        service["healthcheck"]["test"][1]
        for service in COMPOSE["services"].values()
        if "healthcheck" in service
    ]
    assert not {"python", "node"} & set(tested)


def test_nothing_that_the_fleet_needs_stands_behind_a_profile_and_no_example_decides_whether_it_starts():
    started = {name for name, service in COMPOSE["services"].items() if "profiles" not in service}
    assert started == {"tokens", "gateway", "environments", "sandbox"}
