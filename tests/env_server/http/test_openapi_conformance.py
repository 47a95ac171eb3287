"""The OpenAPI document against a server and a gateway: Schemathesis calls all that it describes, as described and not.

`ROLLGYM_SCHEMA_EXAMPLES=200 pytest tests/env_server/http/test_openapi_conformance.py` looks longer.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rollgym.env_server.access.tokens import add_token
from tests.support.foreign_servers import ForeignServer
from tests.support.processes import ROOT
from tests.support.wire import Server

EXAMPLES = os.environ.get("ROLLGYM_SCHEMA_EXAMPLES", "12")
SERVED = "tests.support.served_envs"

CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "410", "429"]
[checks.negative_data_rejection]
expected-statuses = ["401", "403", "404", "409", "410", "413", "415", "422", "429"]
"""
# What is right by its schema, and still cannot be: the parts of an episode fit together, a program is given no more
# than the server has, an action is one of the environment's, a mode is one that it draws in, a split one that it has,
# a URL is one that a gateway may connect to.
MEANING = """
[[operations]]
include-operation-id = "{operation}"
checks.positive_data_acceptance.expected-statuses = ["2xx", "403", "404", "409", "410", "422"]
"""
# A client's own limit of time may be shorter than any step takes.
TIMED = """
[[operations]]
include-operation-id = "post_openenv_step_one"
checks.positive_data_acceptance.expected-statuses = ["2xx", "403", "404", "409", "410", "422", "504"]
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""


FREE = (
    "post_make",
    "post_restore",
    "post_step_one",
    "post_render_one",
    "post_register",
    "post_announce",
    "post_run_code",
    *("post_ors_create", "post_ors_task_one", "post_ors_call_one"),
    *(f"post_ors_{call}_one" for call in ("num_tasks", "tasks", "task_range")),
    *("post_gem_make", "post_gem_step", "post_openenv_reset_one"),
    *(
        "post_openenv_task_one",
        "post_openenv_tasks_one",
        "post_openenv_num_tasks_one",
        "post_openenv_task_range_one",
    ),
)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    file = tmp_path_factory.mktemp("schema") / "tokens.yaml"
    return file, add_token(file, "root", ["admin"])


def conforms(server: Server, token: str, place: Path, env_ids: str) -> None:
    config = place / "schemathesis.toml"
    config.write_text(CONFIG + "".join(MEANING.format(operation=each) for each in FREE) + TIMED)
    command = (
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "--no-color"),
        *("run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {token}"),
        *("--max-examples", EXAMPLES, "--seed", "1", "--no-shrink", "--continue-on-failure"),
        *("--exclude-path", "/v1/ws", "--exclude-path", "/v1/sandbox/session"),
        # Another socket; and JSON-RPC, whose errors are good answers over HTTP: `test_described_routes.py` looks at it.
        *("--exclude-path", "/openenv/{env_id}/ws", "--exclude-path", "/mcp/{env_id}"),
        *("--exclude-path", "/openenv/{env_id}/mcp"),
    )
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "tests.support.schema_hooks",
        "SCHEMA_ENV_IDS": env_ids,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=1800)
    log = server.log()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed inside the server" not in log, log
    assert re.search(r"API Links: +\d+ covered", done.stdout), "sessions were made, and used by what followed"


@pytest.mark.slow
def test_a_server(token_file: tuple[Path, str], tmp_path: Path) -> None:
    file, token = token_file
    arguments = (
        *("--env", f"Count={SERVED}:Count", "--isolation", "Count=inline"),
        *("--env", f"Equal={SERVED}:Equal", "--env", f"SlowCount={SERVED}:SlowCount"),
        *("--token-file", str(file), "--sandbox", "auto"),
    )
    with Server(*arguments) as server:
        conforms(server, token, tmp_path, "Count,SlowCount,Equal")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_gateway(token_file: tuple[Path, str], tmp_path: Path) -> None:
    file, token = token_file
    arguments = ("--gateway", "--allow-network", "loopback", "--token-file", str(file))
    with ForeignServer("python") as upstream, Server(*arguments) as server:
        body = {"env_id": "Guess", "url": upstream.url, "protocol": "http", "ttl_s": 3600}
        headers = {"Authorization": f"Bearer {token}"}
        made = httpx.post(f"{server.url}/v1/envs", json=body, headers=headers, timeout=60)
        assert made.status_code == 201, made.text
        conforms(server, token, tmp_path, "Guess")
