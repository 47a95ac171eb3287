"""Plays agents on many libraries from PyPI against the endpoint, by the libraries' own defaults.

    python peers/agents/libraries.py [NAME ...] [--output benchmarks/results/agent_libraries.json]

Each program of `peers/agents/players/` plays with the libraries that it names. It is run by an interpreter of its
own for each, which has the newest release of the library and nothing of ours. The policy behind the endpoint says what
it is told to, in the form that it is held to. Its ids and log-probabilities in the episode's record must be those of
its own log. The result tells, for each library, the parts of its episode, the routes, forms and fields that it asked
for, how many replies were held to a form, what was ignored (`x-rollgym-ignored`) and what was refused.

Some libraries download tiktoken's vocabularies. Where there is no network, TIKTOKEN_CACHE_DIR names a folder with them.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from peers.agents.library_table import players  # noqa: E402
from rollgym.trainer.records.trajectory import Trajectory  # noqa: E402
from rollgym.trainer.rollout.agents.black_box import SessionTable  # noqa: E402
from rollgym.trainer.rollout.agents.endpoint import agents_app  # noqa: E402
from rollgym.trainer.rollout.agents.http import serve_app  # noqa: E402
from rollgym.trainer.rollout.agents.session import AgentSession  # noqa: E402
from rollgym.trainer.tasks.task import Task  # noqa: E402
from tests.support.agent_policy import (  # noqa: E402
    EngineLog,
    assert_recorded,
    service_of,
    tool_tokenizer,
)
from tests.support.agent_witness import Asked, Witness  # noqa: E402
from tests.support.helpful_policy import HelpfulPolicy  # noqa: E402
from tests.support.peer_processes import peer_environment  # noqa: E402

ENVIRONMENTS = ROOT / "build" / "agents" / "newest"
_PATIENCE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = players()
    names = sorted(known)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}; all by default"
    )
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="where the libraries lie")
    parser.add_argument("--output", type=Path, help="a JSON file; rows of other libraries in it are kept")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"there is no player {', '.join(unknown)}; there are {', '.join(names)}")
    before = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    results = {}
    for name in options.names or names:
        results[name] = asyncio.run(measured(name, *known[name], options.environments / name))
        print(name, json.dumps(results[name], indent=1), flush=True)
        if options.output is not None:
            merged = dict(sorted((before | results).items()))
            options.output.write_text(json.dumps(merged, indent=2) + "\n")
    return 0 if all(result.get("record_equals_log") for result in results.values()) else 1


async def measured(name: str, program: Path, dependencies: list[str], environment: Path) -> dict[str, Any]:
    """Install a library, play its episode, and compare the record with the policy's log."""
    try:
        found = {"library": dependencies[0], "version": installed(dependencies, environment)}
    except subprocess.CalledProcessError as error:
        return {"library": dependencies[0], "not_installed": error.stderr.decode()[-400:]}
    tokenizer = tool_tokenizer()
    policy = HelpfulPolicy(tokenizer)
    service = service_of(policy, tokenizer)
    table = SessionTable(service.model)
    witness = Witness(agents_app(table, 1 << 22))
    async with serve_app(witness, "127.0.0.1", 0) as url:
        session = AgentSession(service, Trajectory(Task(0, "Any-v0", seed=0), 0), None, time.time)
        address = f"{url}/s/{table.add(session, None)}"
        printed = await played([environment / "bin" / "python", program, name], address)
    found["parts"] = parts_of(printed)
    return found | asked_of(witness.asked) | compared(session.trajectory, policy.log)


def installed(dependencies: list[str], environment: Path) -> str:
    """Install what is not there yet; returns the version of the first of the dependencies."""
    python, done = environment / "bin" / "python", environment / "complete"
    uv = [sys.executable, "-m", "uv"]
    if not done.exists():
        subprocess.run([*uv, "venv", "-q", "--clear", "--python", sys.executable, environment], check=True)
        subprocess.run(
            [*uv, "pip", "install", "-q", "--python", python, *dependencies], check=True, stderr=-1
        )
        done.touch()
    name = re.match(r"[\w.-]+", dependencies[0])[0]
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


async def played(command: list[Path | str], address: str) -> str:
    """Run the program to its end; returns what it printed."""
    variables = {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": "any",
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": "any",
        # Telemetry of theirs has no server here.
        "OTEL_SDK_DISABLED": "true",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "ANONYMIZED_TELEMETRY": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "printed").open("w+b") as printed:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=peer_environment() | variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printed,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
        )
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    if process.returncode:
        print(text[-3000:], file=sys.stderr)
    return text


def parts_of(printed: str) -> dict[str, str]:
    """What became of each part; the end of what was printed if the program told nothing."""
    lines = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("PART ")]
    if not lines:
        return {"program": f"failed: {printed[-300:]}"}
    return {
        line["part"]: line.get("said") or f"failed: {line.get('error', 'nothing said')}" for line in lines
    }


def asked_of(asked: list[Asked]) -> dict[str, Any]:
    """Routes with the number of their requests, forms of replies, fields, what was ignored, and what was refused."""
    return {
        "requests": dict(Counter(f"{each.route}{' (stream)' if each.stream else ''}" for each in asked)),
        "forms": dict(Counter(form for each in asked for form in each.forms)),
        "fields": sorted({name for each in asked for name in each.fields}),
        "ignored": sorted({name for each in asked for name in each.ignored}),
        "refused": dict(Counter(f"{each.status} {each.error}" for each in asked if each.status >= 400)),
    }


def compared(trajectory: Trajectory, log: EngineLog) -> dict[str, Any]:
    """Whether every prompt, id, log-probability and version in the record is that of the policy's log."""
    found = {
        "calls": len(log.calls),
        "held": sum(request.sampling.structured is not None for request, _ in log.calls),
        "tokens": sum(len(result.token_ids) for _, result in log.calls),
        "segments": len(trajectory.segments),
    }
    try:
        assert_recorded(trajectory, log)
    except AssertionError:
        traceback.print_exc()
        return found | {"record_equals_log": False}
    return found | {"record_equals_log": bool(log.calls)}


if __name__ == "__main__":
    sys.exit(main())
