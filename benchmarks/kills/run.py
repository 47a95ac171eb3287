"""Kills the processes of asynchronous runs at random moments, and says what became of every sampled token.

    nice python benchmarks/kills/run.py --kills 200 --out benchmarks/results/kills.json

A tiny policy that learns plays FrozenLake, `--staleness` steps ahead. It samples in the trainer ("embedded"), on an
inference server that the run starts ("launched"), or on two that run already ("given"); servers are the conformance
server of the tests. At random moments the trainer, the environment server or an inference server is killed with
SIGKILL, and started again by whoever has to: the script, or the run's own keeper. Afterwards the servers' own logs,
what the inference client gave, the rollout log, the recorded episodes and the ledger are compared token by token.

The lengths of the first episodes that were consumed stand beside those of as many that were started first
(Kolmogorov-Smirnov, two samples): a system that prefers short episodes consumes other ones than it starts.

The work folder keeps everything: started again with the same `--work`, the script goes on. It refuses a folder of
another commit or of other settings. Processes with other `--kinds` may play in one folder at the same time; one without
compares in the end.
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
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rollgym.clients.measuring.revision import revision  # noqa: E402
from tests.support.processes import end, end_with_parent, kill_module  # noqa: E402
from tests.support.server_accounts import server_account_of  # noqa: E402
from tests.support.token_accounts import account_of  # noqa: E402
from tests.support.training_forks import ENGINE_LOG, TrainingForks  # noqa: E402

GROUPS, MEMBERS = 8, 8
TAIL = 3
"""Steps at a run's end that take up what was started before them: their own episodes are not compared."""
PATIENCE_S = 1200.0
"""A run that draws no reply for so long is stuck."""
SHARES = {"given": (0.45, 0.22), "launched": (0.2, 0.18), "embedded": (0.35, 0.6)}
"""Of the kills and of the episodes, by who samples."""
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
algorithm: {preset: grpo, correction: {kind: truncate}}
optimizer: {learning_rate: 1.0e-3}
evaluation: {every: 0, sets: {}}
checkpoint: {every: 1, resume: auto}
tracking: {tensorboard: false, console: false}
"""
SERVED = ["inference.kind=vllm", "inference.dtype=float32", "inference.look_every_s=1"]


class Killable:
    """A program on a port of its own, started again whenever it was killed; it ends with this process."""

    def __init__(self, output: Path, *words: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, *words, "--port", str(port)]
        self._output = output
        self._start()

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._start()

    def close(self) -> None:
        end(self._process)

    def _start(self) -> None:
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )


class Play:
    """One run and all that can be killed of it.

    Args:
        work: The folder of everything.
        kind: Who samples.
        name: The run's.
        steps: How many it has.
        staleness: How many steps its rollouts may be behind.
    """

    def __init__(self, work: Path, kind: str, name: str, steps: int, staleness: int) -> None:
        self.run, self.beside = work / name, work / f"{name}.beside"
        self.output, self.kills = work / f"{name}.output", work / f"{name}.kills.jsonl"
        self.steps = steps
        self._work, self._kind, self._staleness = work, kind, staleness
        self.beside.mkdir(parents=True, exist_ok=True)

    @property
    def done(self) -> bool:
        return (self.run / "model").exists()

    @property
    def killed(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.kills.open()] if self.kills.exists() else []

    @property
    def logs(self) -> list[Path]:
        """What the inference servers wrote down."""
        return sorted(self.beside.glob("server-*.jsonl"))

    def play(self, kills: int) -> None:
        """Train to the end, and kill so many times on the way."""
        draw = random.Random(f"{self.run.name}-{len(self.killed)}")
        with TrainingForks() as forks, ExitStack() as stack:
            words, victims = self._start_servers(stack)
            trainer = forks.start(words, self.output, self.beside)
            while len(self.killed) < kills:
                if not self._lives_for(draw.uniform(0.0, 3.0), forks, trainer):
                    break
                victim = draw.choice(["trainer", *victims])
                self._note(victim)
                if victim == "trainer":
                    forks.kill(trainer)
                    forks.wait(trainer, 60.0)
                    trainer = forks.start(words, self.output, self.beside)
                else:
                    victims[victim]()
                print(
                    f"{self.run.name}: {len(self.killed)} kills, {self._step} of {self.steps} steps",
                    flush=True,
                )
            if code := forks.wait(trainer, 7200.0):
                raise SystemExit(f"the trainer ended with {code}: see {self.output}")

    def _start_servers(self, stack: ExitStack) -> tuple[list[str], dict[str, Any]]:
        """Start what the run needs, and return its command line and how its parts are killed."""

        def started(*words: str) -> Killable:
            server = Killable(self._work / f"{self.run.name}.servers", *words)
            stack.callback(server.close)
            return server

        environment = started("-m", "rollgym.env_server", "--allow-expert")
        config = self._work / "config.yaml"
        words = ["--config", str(config), "--env-url", environment.url, f"output_dir={self.run}"]
        words += [f"steps={self.steps}", f"rollout.max_staleness={self._staleness}"]
        victims: dict[str, Any] = {"environment server": environment.kill}
        if self._kind == "launched":
            program = json.dumps([sys.executable, "-m", "tests.support.vllm_program"])
            log = f"{{ROLLGYM_DOUBLE_LOG: {self.beside / 'server-0.jsonl'}}}"
            words += [*SERVED, f"inference.launch={{command: {program}, restarts: 1000, environment: {log}}}"]
            victims["inference server, launched"] = partial(
                kill_module, "tests.support.vllm_program", self.run
            )
        if self._kind == "given":
            model = self._start_model(words)
            double = ("-m", "tests.support.inference_server", "--dialect", "vllm", "--model", str(model))
            double = (*double, "--logprobs-mode", "processed_logprobs", "--log-file")
            servers = [started(*double, str(self.beside / f"server-{number}.jsonl")) for number in range(2)]
            words += [*SERVED, f"inference.urls={json.dumps([server.url for server in servers])}"]
            for number, server in enumerate(servers):
                victims[f"inference server {number}, given"] = server.kill
        return words, victims

    def _start_model(self, words: list[str]) -> Path:
        """Return a folder that servers of this architecture start from: a run of no steps writes it."""
        folder = self._work / "start"
        if not (folder / "model").exists():
            command = [sys.executable, "-m", "rollgym.trainer.cli", *words, f"output_dir={folder}", "steps=1"]
            subprocess.run(
                command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent
            )
        return folder / "model"

    def _lives_for(self, seconds: float, forks: TrainingForks, trainer: int) -> bool:
        """Wait until replies are drawn again, and for so long after; False if the run ended before."""
        drawn, until = self._drawn, time.monotonic() + PATIENCE_S
        while self._drawn == drawn and forks.ended(trainer) is None:
            if time.monotonic() > until:
                raise SystemExit(f"no reply for {PATIENCE_S:g} s: see {self.output}")
            time.sleep(0.05)
        time.sleep(seconds)
        code = forks.ended(trainer)
        if code is not None and code != 0:
            raise SystemExit(f"the trainer ended by itself with {code}: see {self.output}")
        return code is None

    @property
    def _drawn(self) -> int:
        path = self.beside / ENGINE_LOG
        return path.stat().st_size if path.exists() else 0

    @property
    def _step(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_text().count('"time/step_s"') if path.exists() else 0

    def _note(self, victim: str) -> None:
        with self.kills.open("a") as lines:
            lines.write(json.dumps({"time": time.time(), "victim": victim}) + "\n")


def lengths(play: Play) -> tuple[list[int], list[int]]:
    """Sampled tokens of the first episodes that were consumed, and of as many that were started first."""
    consumed: list[tuple[int, tuple[int, int], int]] = []
    for line in (play.run / "episodes.jsonl").open():
        record = json.loads(line)
        tokens = sum(end - start for _, start, end in (turn["tokens"] for turn in record["turns"]))
        consumed.append((record["step"], (record["task"]["index"], record["member"]), tokens))
    first = [tokens for step, _, tokens in consumed if step < play.steps - TAIL]
    known = {episode: tokens for _, episode, tokens in consumed}
    started = list(dict.fromkeys(_asked(play.beside)))[: len(first)]
    if unknown := [episode for episode in started if episode not in known]:
        raise SystemExit(f"{play.run.name}: {len(unknown)} early episodes were never consumed: {unknown[:3]}")
    return first, [known[episode] for episode in started]


def _asked(beside: Path) -> list[tuple[int, int]]:
    """Task and member of each reply, in the order in which they were drawn."""
    sessions = [json.loads(line)["session"].split("-") for line in (beside / ENGINE_LOG).open()]
    return [(int(words[1]), int(words[2])) for words in sessions if words[0] == "train"]


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


def examined(play: Play) -> dict[str, Any]:
    """Say what became of a run's tokens."""
    account = account_of(play.run, play.beside, play.steps, GROUPS)
    found: dict[str, Any] = {
        "run": play.run.name,
        "kills": dict(Counter(kill["victim"] for kill in play.killed)),
        "steps": play.steps,
        "tokens": vars(account) | {"given_up": dict(account.given_up)},
        "resumed_with_replies": play.output.read_text(errors="replace").count("replies ("),
    }
    faults = [*account.faults, *["lost"] * bool(account.lost), *["drawn twice"] * bool(account.drawn_twice)]
    if play.logs:
        ended = (play.run / "metrics.jsonl").stat().st_mtime
        servers = server_account_of(play.logs, play.beside, [kill["time"] for kill in play.killed], ended)
        found["servers"] = asdict(servers)
        faults += [*servers.faults, *["thrown away"] * bool(servers.thrown_away)]
    consumed, started = lengths(play)
    size = len(consumed) // 4
    quarters = [consumed[place * size : (place + 1) * size] for place in range(4)]
    found["mean_tokens_by_quarter"] = [round(sum(quarter) / size, 2) for quarter in quarters]
    found["consumed"], found["started"] = consumed, started
    found["in_order"] = not faults
    return found


def play_all(options: argparse.Namespace) -> list[Play]:
    """Play until there were as many kills and episodes as the options ask for; what was played stays."""
    plays: list[Play] = []
    for kind in options.kinds:
        kills, episodes = SHARES[kind]
        steps = -(-round(episodes * options.episodes) // (GROUPS * MEMBERS)) + TAIL
        plays.append(Play(options.work, kind, kind, steps, options.staleness))
        if not plays[-1].done:
            plays[-1].play(round(kills * options.kills))
    while len(plays) >= len(SHARES) and (left := options.kills - sum(len(play.killed) for play in plays)) > 0:
        # A run that ended before it was killed as often as it should be is followed by another.
        plays.append(Play(options.work, "given", f"given-{len(plays)}", 8 + TAIL, options.staleness))
        if not plays[-1].done:
            plays[-1].play(left)
    return plays


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Begin a work folder, or go on with it.

    Raises:
        SystemExit: If it is of another commit or of other settings.
    """
    commit = revision()
    wanted = {"commit": commit, "kills": options.kills, "episodes": options.episodes}
    wanted |= {"max_staleness": options.staleness, "config": CONFIG}
    kept = options.work / "settings.json"
    options.work.mkdir(parents=True, exist_ok=True)
    if kept.exists() and (found := json.loads(kept.read_text())) != wanted:
        other = ", ".join(key for key in wanted if wanted[key] != found.get(key))
        raise SystemExit(f"{options.work} holds runs of another {other}: name another --work")
    (options.work / "config.yaml").write_text(CONFIG)
    kept.write_text(json.dumps(wanted))
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--episodes", type=int, default=5000, help="that all runs together consume and compare"
    )
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=list(SHARES),
        choices=list(SHARES),
        help="play these alone, and compare nothing",
    )
    parser.add_argument("--work", type=Path, default=Path("runs/kills"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work = options.work.absolute()
    settings = prepare(options)
    plays = play_all(options)
    if len(plays) < len(SHARES):
        return
    runs = [examined(play) for play in plays]
    consumed = [length for run in runs for length in run.pop("consumed")]
    started = [length for run in runs for length in run.pop("started")]
    statistic, p = kolmogorov_smirnov(consumed, started)
    victims = Counter(kill["victim"] for play in plays for kill in play.killed)
    result = {
        "command": " ".join(["python", "benchmarks/kills/run.py", *sys.argv[1:]]),
        **{key: settings[key] for key in ("commit", "max_staleness")},
        "kills": victims.total(),
        "victims": dict(victims),
        "runs": runs,
        "lengths": {
            "episodes": len(consumed),
            "mean_tokens": {
                "consumed": sum(consumed) / len(consumed),
                "started": sum(started) / len(started),
            },
            "consumed": dict(sorted(Counter(consumed).items())),
            "started": dict(sorted(Counter(started).items())),
            "kolmogorov_smirnov": {"statistic": statistic, "p": p},
        },
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if not all(run["in_order"] for run in runs):
        raise SystemExit("tokens were lost, drawn twice, or not accounted for")


if __name__ == "__main__":
    main()
