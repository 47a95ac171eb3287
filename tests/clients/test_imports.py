"""Serving and clients stay light, and Gymnasium knows our environments."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "ray")
REPORT = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import rollgym; rollgym.EnvClient, rollgym.RemoteEnv, rollgym.RemoteVectorEnv, rollgym.RemoteVerifier",
        "import rollgym.clients.cli.main",
        "import runpy, sys, contextlib; sys.argv = ['roll-serve', '--help']\n"
        "with contextlib.suppress(SystemExit): runpy.run_module('rollgym.env_server', run_name='__main__')",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    assert run(f"{code}\n{REPORT}") == "[]"


def test_our_environments_are_registered_as_names_only() -> None:
    code = (
        "import sys, rollgym, gymnasium; spec = gymnasium.spec('rollgym/FrozenLake-v0');"
        "print('rollgym.envs.games.frozen_lake' in sys.modules, 'rollgym.clients.client.env' in sys.modules,"
        " 'pydantic' in sys.modules)"
    )
    assert run(code) == "False False False"


def test_gymnasium_finds_them_by_the_name_of_the_package() -> None:
    code = "import gymnasium; print(gymnasium.make('rollgym:rollgym/FrozenLake-v0').spec.id)"
    assert run(code) == "rollgym/FrozenLake-v0"
