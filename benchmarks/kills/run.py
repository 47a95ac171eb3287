"""Kills the processes of asynchronous runs at random moments, and says what became of every sampled token.

    nice python benchmarks/kills/run.py --kills 200 --out benchmarks/results/kills.json

A tiny policy plays FrozenLake on a server of its own, `max_staleness` steps ahead. At random moments the trainer or
the environment server is killed with SIGKILL and started again. Afterwards the inference client's own log, the rollout
log, the recorded episodes and the ledger are compared token by token. The lengths of the consumed episodes stand beside
those of a run with the same settings that nobody killed (Kolmogorov-Smirnov, two samples).

The work folder keeps the state: started again with the same `--work`, the script goes on.
"""

import argparse
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.processes import end  # noqa: E402
from tests.support.token_accounts import account_of  # noqa: E402
from tests.support.training_forks import TrainingForks  # noqa: E402

GROUPS, MEMBERS = 8, 8
CONFIG = """
seed: 11
tasks:
  - env_id: FrozenLake-v0
    kwargs: {size: 4, split: train, max_episode_steps: 12, format_penalty: -0.1}
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 384}
prompt: {instruction: none}
# So that moves are moves, and episodes of many lengths.
warm_start: {demonstrations: 100, epochs: 10, batch_rows: 32, learning_rate: 5.0e-3}
rollout: {groups_per_step: 8, group_size: 8, max_turns: 12, max_new_tokens: 3, max_concurrent_sequences: 64}
# The policy hardly moves: then lengths differ by chance, or because of the kills.
optimizer: {learning_rate: 1.0e-7}
evaluation: {every: 0, panels: {}}
checkpoint: {every: 1, resume: auto}
tracking: {tensorboard: false}
"""


class EnvironmentServer:
    """`roll-serve` on one port, started again whenever it was killed."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process = self._start()

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = self._start()

    def close(self) -> None:
        end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "env_server", "--allow-expert", "--port", str(self._port)]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )


def play(work: Path, name: str, steps: int, staleness: int, kills: int, state: dict) -> None:
    """Train to the end, killing so many times on the way."""
    config = work / "config.yaml"
    config.write_text(CONFIG)
    draw = random.Random(f"{name}-{state['kills']}")
    server = EnvironmentServer()
    arguments = ["--config", str(config), "--env-url", server.url, f"output_dir={work / name}"]
    arguments += [f"steps={steps}", f"rollout.max_staleness={staleness}"]
    run, beside, output = work / name, work / f"{name}.beside", work / f"{name}.output"
    try:
        with TrainingForks() as forks:
            trainer = forks.start(arguments, output, beside)
            while state["kills"] < kills:
                # Most moments lie anywhere; before some of them the run gets on, however slow the machine is.
                wanted = _steps(run) + draw.choice((0, 0, 1))
                while _steps(run) < wanted and forks.ended(trainer) is None:
                    time.sleep(0.1)
                time.sleep(draw.uniform(0.0, 5.0))
                code = forks.ended(trainer)
                if code == 0:
                    break
                if code is not None:
                    raise SystemExit(f"the trainer ended by itself with {code}: see {output}")
                victim = draw.choice(["trainer", "trainer", "environment server"])
                if victim == "trainer":
                    forks.kill(trainer)
                    forks.wait(trainer, 60.0)
                    trainer = forks.start(arguments, output, beside)
                else:
                    server.kill()
                state["kills"] += 1
                state["victims"][victim] = state["victims"].get(victim, 0) + 1
                (work / "state.json").write_text(json.dumps(state))
                print(f"{state['kills']} kills, {_steps(run)} of {steps} steps", flush=True)
            code = forks.wait(trainer, 7200.0)
            if code:
                raise SystemExit(f"the trainer ended with {code}: see {output}")
    finally:
        server.close()


def _steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return sum(1 for _ in path.open()) if path.exists() else 0


def lengths(run: Path) -> list[int]:
    """Sampled tokens of each consumed episode."""
    return [
        sum(end - start for _, start, end in (turn["tokens"] for turn in json.loads(line)["turns"]))
        for line in (run / "episodes.jsonl").open()
    ]


def commit() -> str:
    """Return the commit that is measured."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def kolmogorov_smirnov(first: list[int], second: list[int]) -> tuple[float, float]:
    """Return the two-sample statistic and its asymptotic p (Kolmogorov's series), conservative where values repeat."""
    one, other = Counter(first), Counter(second)
    statistic = below_one = below_other = 0.0
    for value in sorted({*one, *other}):
        below_one += one[value] / len(first)
        below_other += other[value] / len(second)
        statistic = max(statistic, abs(below_one - below_other))
    scaled = statistic * math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    if scaled < 0.2:
        return statistic, 1.0
    return statistic, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--episodes", type=int, default=5000, help="Episodes that each of the two runs consumes."
    )
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/kills"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    steps = -(-options.episodes // (GROUPS * MEMBERS))
    kept = options.work / "state.json"
    state = json.loads(kept.read_text()) if kept.exists() else {"kills": 0, "victims": {}, "commits": []}
    state["commits"] += [commit()] if commit() not in state["commits"] else []
    began = time.time()
    for name, kills in (("undisturbed", 0), ("killed", options.kills)):
        if not (options.work / name / "model").exists():
            play(options.work, name, steps, options.staleness, kills, state)
    run, beside = options.work / "killed", options.work / "killed.beside"
    account = account_of(run, beside, steps, GROUPS)
    consumed, reference = lengths(run), lengths(options.work / "undisturbed")
    statistic, p = kolmogorov_smirnov(consumed, reference)
    output = (options.work / "killed.output").read_text(errors="replace")
    result = {
        "command": " ".join(["python", "benchmarks/kills/run.py", *sys.argv[1:]]),
        "commits": state["commits"],
        "kills": state["kills"],
        "victims": state["victims"],
        "steps": steps,
        "max_staleness": options.staleness,
        "tokens": {key: value for key, value in vars(account).items() if key != "faults"},
        "faults": account.faults,
        "resumed_with_replies": output.count("replies ("),
        "episodes": {"killed": len(consumed), "undisturbed": len(reference)},
        "mean_tokens": {
            "killed": sum(consumed) / len(consumed),
            "undisturbed": sum(reference) / len(reference),
        },
        "lengths": {
            name: dict(sorted(Counter(values).items()))
            for name, values in (("killed", consumed), ("undisturbed", reference))
        },
        "kolmogorov_smirnov": {"statistic": statistic, "p": p},
        "seconds": time.time() - began,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if account.faults or account.lost or account.drawn_twice:
        raise SystemExit("tokens were lost, drawn twice, or not accounted for")


if __name__ == "__main__":
    main()
