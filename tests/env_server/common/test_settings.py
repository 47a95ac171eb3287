"""Settings: from flags and YAML alike, strict, and each read by code."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.cli import main
from rollgym.env_server.common.settings import ConfigurationError, SandboxSettings, Section, ServerSettings
from rollgym.env_server.common.settings_loading import load_settings
from rollgym.extras import install_line
from tests.support.wire import ENVS, INLINE, Server

SOURCE = Path(__file__).parents[3] / "env_server"
FRAGILE = "tests.support.fragile_envs"


def test_every_setting_is_read_by_code() -> None:
    read: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    assert set(ServerSettings.model_fields) <= read


@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        ({}, "", {}),
        ({}, "port: 0\nlinger_s: 1.5\n", {"port": 0, "linger_s": 1.5}),
        ({"port": "9"}, "port: 0\n", {"port": 9}),
        ({"env": ["m:C"]}, "env: [a:B]\n", {"env": ("m:C",)}),
        ({"isolation": ["A=inline"]}, "", {"isolation": {"A": "inline"}}),
        ({"operator_kwargs": ['A={"x": [1]}']}, "", {"operator_kwargs": {"A": {"x": [1]}}}),
        ({"env_step_timeout_s": ["A=0.5"]}, "", {"env_step_timeout_s": {"A": 0.5}}),
        ({"workers": "ray"}, "ray_address: auto\n", {"workers": "ray", "ray_address": "auto"}),
        ({"workers": "3"}, "workers: ray\n", {"workers": 3}),
    ],
)
def test_values(tmp_path: Path, flags: dict[str, Any], text: str, expected: dict[str, Any]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    settings = load_settings(flags, file)
    assert settings == ServerSettings(**expected)


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        ({}, "lingers: 3\n", "unknown setting 'lingers'; did you mean 'linger_s'?"),
        ({}, "port: http\n", "port: "),
        ({}, "port: 70000\n", "port: "),
        ({"register_with": ["gateway:8000"]}, "", "'gateway:8000' is no address of a server: write http://"),
        ({}, "advertise: 10.0.0.1\n", "'10.0.0.1' is no address of a server: write http://HOST:PORT"),
        ({}, "workers: 0\n", "workers: "),
        ({}, "workers: rya\n", "workers: a number from 1 to 1024, or `ray`"),
        ({}, "ray_max_actors: 3\n", "ray_max_actors is for `workers: ray` only"),
        ({}, "workers: ray\nray_min_actors: 65\n", "ray_min_actors is more than ray_max_actors"),
        ({}, "workers: ray\nprocesses: 2\n", "set ray_address to auto"),
        ({}, "workers: ray\nray_num_cpus: -1\n", "ray_num_cpus: "),
        ({}, "step_timeout_s: -1\n", "step_timeout_s: "),
        ({}, "step_timeout_s: .nan\n", "step_timeout_s: "),
        ({}, "- port\n", "mapping of settings"),
        ({}, "port: [\n", "cannot read"),
        ({}, "host: 0.0.0.0\n", "loopback"),
        ({}, "gateway: true\nprocesses: 2\n", "one I/O process"),
        ({}, "journal_url: redis://127.0.0.1\n", "journal_url is for gateways"),
        ({}, "gateway: true\njournal_replicas: 1\n", "set journal_url"),
        ({}, "isolation: {A: cloud}\n", "isolation.A"),
        ({}, "isolation: {a/b: inline}\n", "isolation"),
        ({"isolation": ["inline"]}, "", "not ENV=VALUE"),
        ({"operator_kwargs": ["A={"]}, "", "not JSON"),
        ({"operator_kwargs": ["A=" + 100_000 * "["]}, "", "not JSON"),
        ({"operator_kwargs": ['A={"x": ' + 5_000 * "1" + "}"]}, "", "not JSON"),
    ],
)
def test_mistakes(tmp_path: Path, flags: dict[str, Any], text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        load_settings(flags, file)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "no_such_module:Class"], "cannot import"),
        (["--env", "tests.support.broken_module:Class"], "RuntimeError: this module has a bad day"),
        (["--env", "json:NoSuch"], "module 'json' has no attribute 'NoSuch'"),
        (["--env", "json:JSONDecoder"], "not a subclass of gymnasium.Env"),
        (["--env", "json"], "not of the form module:attribute"),
        (["--env", "a b=json:JSONDecoder"], "cannot be the id"),
        (["--gymnasium", "NoSuch-v0"], "cannot serve"),
        (["--isolation", "NoSuch=inline"], "isolation names 'NoSuch', which is not served"),
        (["--gymnasium", "CartPole-v1", "--gymnasium", "CartPole-v1"], "two environments"),
        (
            ["--gymnasium", "CartPole-v1", "--kwargs-schemas", 'CartPole-v1={"type": 3}'],
            "this is no JSON Schema",
        ),
        (["--gymnasium", "CartPole-v1", "--operator-kwargs", 'CartPole-v1={"no": 1}'], "cannot be made"),
        (["--workers", "ray", "--ray-address", "127.0.0.1:1"], "cannot connect to Ray at '127.0.0.1:1'"),
        (["--config", "/nonexistent/config.yaml"], "cannot read"),
        (["--token-file", "/nonexistent/tokens.yaml"], "cannot read"),
        (["--state-dir", "/proc/state"], "state_dir: /proc/state cannot be made"),
        (["--host", "127..1"], "cannot listen on 127..1"),
    ],
)
def test_a_server_that_cannot_serve_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--port", "0", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_server_without_ray_says_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['ray'] = None; from rollgym.env_server.cli import main; "
        "main(['--port', '0', '--workers', sys.argv[1]])"
    )
    ended = subprocess.run([sys.executable, "-c", script, "ray"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert install_line("ray") in ended.stderr


async def test_a_server_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    named = {name: f"tests.support.served_envs:{name}" for name in ("Count",)}
    schema = {
        "type": "object",
        "properties": {"is_slippery": {"type": "boolean"}},
        "additionalProperties": False,
    }
    file.write_text(
        yaml.safe_dump(
            {
                "env": [f"{name}={target}" for name, target in named.items()],
                "gymnasium": ["Lake=FrozenLake-v1"],
                "isolation": {"Count": "thread", "Lake": "inline"},
                "kwargs_schemas": {"Lake": schema},
                "linger_s": 7.0,
            }
        )
    )
    with Server("--config", str(file), "--linger-s", "8") as server:
        async with server.http() as client:
            assert (await client.get("/v1/info")).json()["limits"]["linger_s"] == 8.0
            info = (await client.get("/v1/envs/Count")).json()
            assert (info["isolation"], info["version"], info["origin"]) == ("thread", "7", "local")
            lake = (await client.get("/v1/envs/Lake")).json()
            assert (lake["kwargs_schema"], lake["max_episode_steps"], lake["version"]) == (schema, 100, "1")
            made = await client.post(
                "/v1/sessions", json={"env_id": "Lake", "kwargs": {"is_slippery": False}, "reset": {}}
            )
            path = f"/v1/sessions/{made.json()['session_id']}"
            assert [
                (await client.post(f"{path}/step", json={"action": 2})).json()["observation"]
                for _ in range(2)
            ] == [1, 2]


async def test_standard_output_is_for_the_ready_line() -> None:
    with Server("--env", f"Loud={FRAGILE}:Loud", "--isolation", "Loud=thread") as server:
        async with server.socket() as socket:
            assert "ok" in await socket.ask("make", env_id="Loud", reset={})
        server.process.terminate()
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""
        assert server.stop() == 0
        assert "this is loud" in server.log()


@pytest.mark.parametrize(("trust_inline", "isolation"), [(False, "process"), (True, "inline")])
def test_a_class_of_an_author_runs_inline_only_where_the_operator_trusts_it(
    trust_inline: bool, isolation: str
) -> None:
    classes = ("Countdown=rollgym.envs.games.countdown:CountdownEnv", "tests.support.served_envs:SlowCount")
    catalog = Catalog.load(ServerSettings(env=classes, builtin=False, trust_inline=trust_inline))
    assert catalog.get("Countdown").isolation == isolation
    assert catalog.get("SlowCount").isolation == "process", "it does not ask"


async def test_isolation_follows_the_rule() -> None:
    with Server(*ENVS, *INLINE) as server, Server("--gymnasium", "CartPole-v1") as other:
        async with server.http() as client:
            envs = {each["env_id"]: each for each in (await client.get("/v1/envs")).json()["envs"]}
            assert envs["FrozenLake-v0"]["isolation"] == "inline", "ours declares it"
            assert envs["SlowCount"]["isolation"] == "process"
            stateless = (await client.get("/v1/envs", params={"kind": "stateless"})).json()["envs"]
            assert "Equal" in {each["env_id"] for each in stateless}
            assert (await client.get("/v1/envs", params={"origin": "registered"})).json() == {"envs": []}
        async with other.http() as client:
            info = (await client.get("/v1/envs/CartPole-v1")).json()
            assert info["isolation"] == "process"
            assert info["action_space"] == {"type": "Discrete", "n": 2, "start": 0}
            assert info["max_episode_steps"] == 500


def test_each_setting_stands_in_one_section() -> None:
    named = [name for section in ServerSettings.__bases__ for name in getattr(section, "model_fields", {})]
    assert sorted(named) == sorted(ServerSettings.model_fields)


def test_help_begins_with_how_it_is_called_and_shows_settings_by_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: roll-serve [--config FILE] [settings]\n")
    assert all(
        f"\n{section.title}:\n" in shown
        for section in ServerSettings.__bases__
        if issubclass(section, Section)
    )


def test_a_sandbox_that_the_variable_names_on_another_server_serves_nobody_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLGYM_SANDBOX", "remote:http://127.0.0.1:1")
    assert not SandboxSettings(sandbox="").runs_code
    monkeypatch.setenv("ROLLGYM_SANDBOX", "namespaces")
    assert SandboxSettings(sandbox="").runs_code
