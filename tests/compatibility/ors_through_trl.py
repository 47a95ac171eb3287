"""Plays every built-in environment through TRL's `OpenRewardSpec`, and compares with our own client; run by `.ci/ors`.

Both play the same task with the same actions: those of the environment's expert, or a plain reply where it has none.
"""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from gymnasium import spaces

from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.replies.formats.calls import read_calls
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.env_server.protocols.mcp_forms import own_tools, seen_text
from rollgym.envs.registry import builtin_environments

TASKS = 2
MOST_TURNS = 12
PAGE = Path(__file__).parents[2] / "docs" / "ors.md"
OTHERS = ("CartPole-v1", "Taxi-v4", "Pendulum-v1")


@contextmanager
def served() -> Iterator[str]:
    """A server with all built-in environments and some whose actions are no text."""
    flags = [part for env_id in OTHERS for part in ("--gymnasium", env_id)]
    command = [sys.executable, "-m", "rollgym.env_server", "--port", "0", "--allow-expert", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            while "serving on" not in line:
                assert line, "the server did not start"
                line = process.stdout.readline()
            yield line.partition("serving on ")[2].split()[0]
        finally:
            process.terminate()


def play(url: str, env_id: str) -> int:
    """Play some tasks both ways, and return how many calls that took."""
    from trl.experimental.openreward import OpenRewardSpec

    spec = OpenRewardSpec(url, env_name=env_id, num_tasks=TASKS)
    rows = spec.train_dataset
    assert rows["task_index"] == list(range(TASKS)), rows
    theirs = spec.environment_factory()
    calls = 0
    for row in rows:
        calls += _play_task(url, env_id, theirs, row)
    theirs._close()
    assert httpx.get(f"{url}/v1/sessions").json()["sessions"] == [], "the client's sessions have ended"
    return calls


def _play_task(url: str, env_id: str, theirs: Any, row: dict[str, Any]) -> int:
    with RemoteEnv(url, env_id, _kwargs(url, env_id, row["split"])) as ours:
        expert = bool(ours.metadata.get("expert"))
        observation, info = ours.reset(seed=row["seed"], options={"expert": True} if expert else None)
        prompt = theirs.reset(**row)
        assert str(observation) in prompt if isinstance(observation, str) else prompt, (env_id, prompt)
        ours.action_space.seed(row["seed"])
        tools, name = own_tools(info), "submit" if hasattr(theirs, "submit") else "step"
        for turn in range(MOST_TURNS):
            action = _action(ours, info, expert)
            call = _as_call(action, info, tools) if isinstance(action, str) else None
            tool, given = call or (name, {"response" if name == "submit" else "action": _plain(action)})
            said = getattr(theirs, tool)(**given)
            try:
                observation, reward, terminated, truncated, info = ours.step(action)
            except ProblemError as problem:
                failure: str | None = problem.code
            else:
                failure = None
            if failure is not None:
                assert failure in said, (env_id, failure, said)
                assert theirs.rewards[-1] is None, (env_id, "a failure is no reward")
                return turn + 1
            seen = (
                seen_text({"observation": observation, "info": info})
                if isinstance(observation, str)
                else said
            )
            assert (said, theirs.reward) == (seen or "(no output)", reward), (
                env_id,
                action,
                said,
                seen,
                reward,
            )
            assert theirs.finished == (terminated or truncated), env_id
            if theirs.finished:
                assert "has ended" in getattr(theirs, tool)(**given), "calls after the end are refused"
                return turn + 1
        return MOST_TURNS


def _kwargs(url: str, env_id: str, split: str) -> dict[str, Any] | None:
    schema = httpx.get(f"{url}/v1/envs/{env_id}").json()["kwargs_schema"]
    return {"split": split} if "split" in schema.get("properties", {}) else None


def _action(ours: RemoteEnv, info: dict[str, Any], expert: bool) -> Any:
    if expert:
        return str(info["expert_action"])
    if not isinstance(ours.action_space, UnicodeText | spaces.Text):
        return ours.action_space.sample()
    return str(next(iter(info.get("available_actions") or ()), "<answer>1</answer>"))


def _as_call(text: str, info: dict[str, Any], tools: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The one call that a reply is, if it is one."""
    if not tools:
        return None
    read = read_calls(
        text,
        FORMATS[str(info.get("call_format", "hermes"))],
        {name: tool["inputSchema"] for name, tool in tools.items()},
    )
    if read.faults or len(read.calls) != 1 or read.calls[0].name not in tools:
        return None
    return read.calls[0].name, dict(read.calls[0].arguments)


def _plain(action: Any) -> Any:
    return action.tolist() if hasattr(action, "tolist") else action


def main() -> None:
    """Play, and say what was played."""
    began = time.monotonic()
    complaints: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    with served() as url:
        # The client asks a host of OpenReward's own otherwise, whatever its base URL.
        os.environ["OPENREWARD_SESSION_URL"] = os.environ["OPENREWARD_API_URL"] = url
        os.environ["OPENREWARD_API_KEY"] = ""
        for env_id in (*builtin_environments(), *OTHERS):
            print(f"{env_id:24} {play(url, env_id):3} calls", flush=True)
        (example,) = re.findall(r"```python\n(from trl.*?)```", PAGE.read_text(), re.DOTALL)
        example = example.replace("http://127.0.0.1:8000", url)
        subprocess.run([sys.executable, "-c", example], check=True, timeout=120)
    # A ping that fails is no error there until five have failed.
    assert not complaints, complaints
    print(f"TRL's openreward module played all of them in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
