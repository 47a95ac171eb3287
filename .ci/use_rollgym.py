"""Use an installed rollgym as a program in a project of the user's does; prints what worked, and fails at what did not.

It is copied into a project and run there by the Python of an environment with a base install, or, with `--train`, of
one with the extra `train`.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import traceback
from importlib import resources
from pathlib import Path
from urllib.parse import urljoin

# Of what an extra brings, each may be missing in a base install.
OF_EXTRAS = ("torch", "transformers", "PIL", "[train]")
COMMANDS = Path(sys.executable).parent


def run(*words: str, code: int = 0) -> str:
    """Run a command of ours in this folder, and return what it printed."""
    done = subprocess.run(
        [COMMANDS / words[0], *words[1:]], capture_output=True, text=True, timeout=120, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, f"{' '.join(words)} ended with {done.returncode}:\n{said}"
    assert "Traceback" not in said, said
    return said


def public_names() -> str:
    import rollgym

    lacking = []
    for name in rollgym.__all__:
        try:
            getattr(rollgym, name)
        except ImportError as error:
            assert any(each in str(error) for each in OF_EXTRAS), f"rollgym.{name}: {error}"
            lacking.append(name)
    return f"{len(rollgym.__all__) - len(lacking)} of {len(rollgym.__all__)} without an extra"


def app() -> str:
    return asyncio.run(_assets())


async def _assets() -> str:
    import httpx

    from rollgym import create_app

    server = create_app()
    transport = httpx.ASGITransport(server, client=("127.0.0.1", 1))
    async with (
        server.lifespan(server),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        assert (await client.get("/v1/envs")).status_code == 200
        page = (await client.get("/console")).raise_for_status().text
        assets = re.findall(r'(?:src|href)="([^"]+\.(?:js|css|svg))"', page)
        assert assets, page
        for asset in assets:
            assert (await client.get(urljoin("/console", asset))).raise_for_status().content, asset
    return f"the console names {len(assets)} assets, and they are there"


def training() -> str:
    import rollgym

    try:
        rollgym.train({"tasks": [{"env_id": "FrozenLake-v0"}]}, steps=1)
    except ImportError as error:
        assert "[train]" in str(error), error
        return f"without the extra: {str(error)[:80]}"
    raise AssertionError("a base install has trained")


def report() -> str:
    import rollgym

    folder = resources.files(rollgym).joinpath("trainer", "evaluation", "reporting")
    assets = sorted(
        each.name for each in folder.iterdir() if each.name.startswith("page.") and each.is_file()
    )
    assert assets == ["page.css", "page.html", "page.js", "page.py"], assets
    return "its page, script and style are there"


def sandbox() -> str:
    from rollgym import Program, SandboxUnavailableError, open_sandbox

    try:
        # Its launcher is started without `site`, the variables and the working directory.
        found = open_sandbox("namespaces")
    except SandboxUnavailableError as error:
        return f"not tried, for this machine has no namespaces: {error}"
    result = found.run(Program("python", "print(6 * 7)"))
    found.close()
    assert result.stdout == b"42\n", result
    return "namespaces: 42"


def commands() -> str:
    assert "rollgym" in run("roll-serve", "--version")
    assert "usage" in run("roll-agent-proxy", "--help")
    assert "grpo" in run("roll-train", "algorithms")
    assert "FrozenLake-v0" in run("roll-env", "list")
    if Path("coin.py").exists():
        run("roll-env", "check", "coin:Coin")
    said = run("roll-env", "doctor")
    assert "0 failed" in said, said
    return said.strip().splitlines()[-1]


def remote() -> str:
    from rollgym import RemoteEnv
    from rollgym.clients.process.local_server import LocalServer

    own = ["--env", "coin:Coin"] if Path("coin.py").exists() else []
    with LocalServer(own) as server:
        with RemoteEnv(server.url, "FrozenLake-v0") as env:
            env.reset(seed=0)
            env.step("Right")
        if own:
            with RemoteEnv(server.url, "Coin") as env:
                env.reset(seed=0)
                assert env.step("heads")[1] == 1.0
    return "FrozenLake-v0" + (" and an environment of this project" if own else "")


def trained() -> str:
    import rollgym

    words = {
        "serve": ["coin:Coin"],
        "tasks": [{"env_id": "Coin"}],
        "model": {"device": "cpu", "hidden_size": 32, "layers": 1, "heads": 2, "max_length": 64},
        "prompt": {"context": "single_turn", "instruction": "none"},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_turns": 1, "max_new_tokens": 4},
        "algorithm": "grpo",
        "steps": 1,
    }
    run(
        "roll-train",
        *(f"{name}={json.dumps(value)}" for name, value in words.items()),
        "output_dir=by_command",
    )
    run("roll-train", "report", "by_command")
    rollgym.train({**words, "output_dir": "by_python"})
    for folder in ("by_command", "by_python"):
        assert Path(folder, "model", "model.safetensors").exists(), folder
    return "by the command and from Python"


def main() -> int:
    os.environ["COLUMNS"] = "200"
    failed = 0
    base = (public_names, app, remote, sandbox, training, report, commands)
    for check in (trained,) if "--train" in sys.argv else base:
        try:
            print(f"  {check.__name__}: {check()}")
        except Exception:  # the check is what failed; the others are still to be seen
            failed += 1
            print(f"  {check.__name__}: FAILED\n{traceback.format_exc()}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
