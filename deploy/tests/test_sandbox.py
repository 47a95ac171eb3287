"""Programs of models in the fleet: the nodes hand them to the service that runs them."""

import json

import httpx
import pytest

from deploy.tests.fleet import Fleet

# As an environment on a node does.
RUN = """
import json, sys
from rollgym.sandbox.core.base import Program
from rollgym.sandbox.selection import open_sandbox
sandbox = open_sandbox("remote:http://sandbox:8000?token_file=/run/tokens/sandbox")
result = sandbox.run(Program(sys.argv[1], sys.argv[2]))
print(json.dumps([result.outcome, result.stdout.decode(), result.stderr.decode(), result.guarantees.level]))
"""


def run(fleet: Fleet, language: str, source: str) -> list[str]:
    node = fleet.containers("environments")[0]
    answer: list[str] = json.loads(fleet.inside(node, "python", "-c", RUN, language, source))
    return answer


def test_programs_run_in_namespaces_of_their_own(fleet: Fleet) -> None:
    assert run(fleet, "python", "print(6 * 7)") == ["ok", "42\n", "", "namespaces"]
    source = '#include <cstdio>\nint main() { puts("compiled"); }'
    assert run(fleet, "cpp", source)[:2] == ["ok", "compiled\n"]


def test_a_program_sees_neither_the_fleet_nor_its_secrets(fleet: Fleet) -> None:
    source = """
import os, socket
seen = [path for path in ("/run/tokens", "/etc/rollgym", "/opt/rollgym/lib/python3.11/site-packages/env_server/cli.py")
        if os.path.isdir(path) and os.listdir(path) or os.path.isfile(path)]
for address in (("127.0.0.1", 8000), ("gateway", 8000), ("sandbox", 8000)):
    try:
        socket.create_connection(address, timeout=2)
        seen.append(address)
    except OSError:
        pass
print(seen, os.getuid(), sorted(os.environ))
"""
    outcome, stdout, stderr, _ = run(fleet, "python", source)
    assert (outcome, stderr) == ("ok", "")
    seen, _, rest = stdout.partition(" 65534 ")
    assert seen == "[]"
    assert "TOKEN" not in rest


def test_a_stranger_runs_nothing(fleet: Fleet) -> None:
    node = fleet.containers("environments")[0]
    ask = (
        "import httpx; answer = httpx.post('http://sandbox:8000/run_code', json={'code': '1', 'language': 'python'}); "
        "print(answer.status_code)"
    )
    assert fleet.inside(node, "python", "-c", ask).strip() == "401"


def test_an_item_is_scored_through_gateway_node_and_sandbox(fleet: Fleet) -> None:
    if "CodeTests-v0" not in fleet.replicas():
        pytest.skip("this fleet's image has no CodeTests-v0")
    task = {
        "prompt": 'def double(number):\n    """Return twice the number."""\n',
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-5) == -10\n",
    }
    programs = (
        "def double(number): return number * 2",
        "def double(number): return 4",
        "raise SystemExit(0)",
    )
    items = [{**task, "response": f"```python\n{program}\n```"} for program in programs]
    answer = httpx.post(
        f"{fleet.url}/v1/verify/CodeTests-v0",
        json={"items": items},
        headers={"Authorization": f"Bearer {fleet.token}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    right, half, none = answer.json()["results"]
    assert (right["score"], right["outcome"]) == (1.0, "correct"), right
    assert half["score"] < 1.0
    assert none["score"] == 0.0
