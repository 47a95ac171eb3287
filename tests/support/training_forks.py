"""Training runs that start at once, to be killed at any moment: forks of a process that has imported everything.

Each run keeps, beside its own directory, what a run has no use for and a test has: every reply that its inference
client gave, in `engine.jsonl` before the trainer sees it, and the files of the rollout log that it deletes, in
`archive/`.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.support.processes import ROOT, end_with_parent

ENGINE_LOG = "engine.jsonl"
ARCHIVE = "archive"


class TrainingForks:
    """Starts, kills and awaits runs; a context manager."""

    def __init__(self) -> None:
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "tests.support.training_forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=end_with_parent,
        )

    def __enter__(self) -> Self:
        self._ask({"do": "nothing"})
        return self

    def __exit__(self, *_: object) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper.wait(60)

    def start(self, arguments: list[str], output: Path, beside: Path) -> int:
        """Start `roll-train` and give its process id.

        Args:
            arguments: Its command line.
            output: Where what it prints is appended.
            beside: The folder of what is kept for the test.
        """
        beside.mkdir(parents=True, exist_ok=True)
        return self._ask(
            {"do": "start", "arguments": arguments, "output": str(output), "beside": str(beside)}
        )

    def ended(self, process: int) -> int | None:
        """Return the exit code of a run that ended (negative: the signal that killed it), or None."""
        return self._ask({"do": "poll", "process": process})

    def kill(self, process: int) -> None:
        """Kill a run, and everything that it started, at once."""
        os.killpg(process, signal.SIGKILL)

    def wait(self, process: int, patience_s: float) -> int:
        """Wait for a run's end and give its exit code."""
        return self._ask({"do": "wait", "process": process, "patience_s": patience_s})

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._helper.stdin.write(json.dumps(question) + "\n")
        self._helper.stdin.flush()
        answer = self._helper.stdout.readline()
        if not answer:
            raise RuntimeError("the helper that forks runs has died")
        return json.loads(answer)


def _serve() -> None:
    import rollgym.trainer.run.train  # noqa: F401 - what every run would import

    left: dict[int, int] = {}
    for line in sys.stdin:
        question = json.loads(line)
        answer: int | None = 0
        match question["do"]:
            case "start":
                answer = _fork(question["arguments"], Path(question["output"]), Path(question["beside"]))
            case "poll":
                answer = _code(question["process"], left)
            case "wait":
                until = time.monotonic() + question["patience_s"]
                while (answer := _code(question["process"], left)) is None:
                    if time.monotonic() > until:
                        os.killpg(question["process"], signal.SIGKILL)
                    time.sleep(0.02)
        print(json.dumps(answer), flush=True)


def _code(process: int, left: dict[int, int]) -> int | None:
    if process not in left:
        found, status = os.waitpid(process, os.WNOHANG)
        if found == 0:
            return None
        left[process] = os.waitstatus_to_exitcode(status)
    return left[process]


def _fork(arguments: list[str], output: Path, beside: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        end_with_parent()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _keep(beside)
        from rollgym.trainer.cli import main

        code = main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _keep(beside: Path) -> None:
    """Have this process keep what its inference client says, and what it deletes of the rollout log."""
    from rollgym.trainer.records.rollout_log import RolloutLog
    from rollgym.trainer.rollout.log_replay import LoggedClient

    settle, make = RolloutLog.settle, LoggedClient.__init__
    archive = beside / ARCHIVE
    archive.mkdir(exist_ok=True)

    def settle_and_keep(log: RolloutLog, *arguments: Any) -> Callable[[], None]:
        for path in log._folder.glob("*.log"):
            # A number is given again once all files are gone and the process is another.
            kept = archive / f"{path.name}-{path.stat().st_ino}-{path.stat().st_ctime_ns}"
            if path.stat().st_nlink == 1:
                os.link(path, kept)
        return settle(log, *arguments)

    def make_listening(logged: LoggedClient, client: Any, recall: Any) -> None:
        make(logged, _Listening(client, beside / ENGINE_LOG), recall)

    RolloutLog.settle = settle_and_keep  # type: ignore[method-assign]
    LoggedClient.__init__ = make_listening  # type: ignore[method-assign]


class _Listening:
    """An inference client that writes down what it answers before it answers."""

    def __init__(self, client: Any, path: Path) -> None:
        self._client = client
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request: Any) -> Any:
        result = await self._client.generate(request)
        self._note(request, result)
        return result

    async def generate_together(self, requests: list[Any]) -> list[Any]:
        results = await self._client.generate_together(requests)
        for request, result in zip(requests, results, strict=True):
            self._note(request, result)
        return results

    def _note(self, request: Any, result: Any) -> None:
        line = {
            "session": request.session_key,
            "turn": request.order[-1] if request.order else -1,
            "prompt": request.prompt_ids,
            "ids": result.token_ids,
            "versions": result.policy_versions,
            "logprobs": base64.b64encode(array("d", result.logprobs).tobytes()).decode(),
            "process": os.getpid(),
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    _serve()
