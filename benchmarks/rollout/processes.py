"""The schedules of `run.py` with real processes: a served environment that sleeps, an inference server that decodes.

The environment server is `roll-serve`, the inference server the conformance server of the tests (vLLM's dialect), whose
decoding steps take `--step-s` at least, as many rows in each as the profile has slots. Scheduler, slots, sessions over
WebSocket and requests over HTTP are the trainer's own; training sleeps. Times are those of the profile `frozen_lake`
times `--speed`.

The bound is that of `run.py`, with the engine as fast as it proved to be when it was kept full and nothing else ran:
sampled tokens of what was trained over that rate, or the training of all steps. The pipeline is empty when the run
begins, and what is under way when it ends was sampled for nothing: over few steps that costs more than over many, so
beside each row stands what the virtual clock says of as many steps.

The engine's rate is measured before and after every run, and the faster one counts. Schedules take turns over
`--rounds`, and the median of each is told with all its runs. A run beside which the engine's two rates are more than
5 % apart had a machine that was not quiet: it is told, and left out of the median where others are there.

    python benchmarks/rollout/processes.py --output benchmarks/results/rollout_processes.json
"""

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from profiles import FrozenLake  # noqa: E402
from run import CountingSource, Schedule, play_run  # noqa: E402

from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams  # noqa: E402
from rollgym.trainer.inference.forwarding import GenerationQueue  # noqa: E402
from rollgym.trainer.inference.server_client.client import ServerClient  # noqa: E402
from rollgym.trainer.records.group import GroupPlan  # noqa: E402
from rollgym.trainer.records.ledger import Ledger  # noqa: E402
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome  # noqa: E402
from rollgym.trainer.rollout.admission import AdmissionWindow  # noqa: E402
from rollgym.trainer.rollout.environments import EnvironmentPool  # noqa: E402
from rollgym.trainer.rollout.scheduler import RolloutScheduler  # noqa: E402
from rollgym.trainer.rollout.slots import EpisodeSlots  # noqa: E402
from rollgym.trainer.tasks.task import Task  # noqa: E402
from tests.support.inference_server.running import InferenceServerProcess  # noqa: E402
from tests.support.processes import env_server  # noqa: E402
from tests.support.virtual_time import run_virtually  # noqa: E402

PROFILE = FrozenLake(groups=8, group_size=4, slots=8)
"""A quarter of the profile: the same share of work for each slot, and fewer requests for processes on few cores."""
TOKENS = 5
PROMPT = list(range(20, 40))


@dataclass(frozen=True)
class Bench:
    """What a run needs."""

    client: ServerClient
    pool: EnvironmentPool
    speed: float

    def request(self, name: str, priority: int = 0) -> GenerationRequest:
        sampling = SamplingParams(TOKENS)
        return GenerationRequest(name, PROMPT, sampling, seed=1, priority=priority, session_key=name)


async def rate_when_full(bench: Bench, seconds: float) -> float:
    """Tokens a second of the engine with all its slots taken, once it is warm."""
    await asyncio.gather(*(bench.client.generate(bench.request(f"warm-{number}")) for number in range(64)))
    end = time.monotonic() + seconds
    tokens = 0

    async def keep_asking(number: int) -> None:
        nonlocal tokens
        turn = 0
        while time.monotonic() < end:
            turn += 1
            result = await bench.client.generate(bench.request(f"full-{number}-{turn}"))
            tokens += len(result.token_ids)

    began = time.monotonic()
    # Some wait, so that no row stands empty while a reply travels.
    await asyncio.gather(*(keep_asking(number) for number in range(PROFILE.slots + 8)))
    return tokens / (time.monotonic() - began)


async def play_steps(bench: Bench, schedule: Schedule, steps: int) -> dict[str, float]:
    """Play and train so many steps; gives what they took."""
    queue = GenerationQueue(bench.client, PROFILE.slots)

    async def play(task: Task, member: int, attempt: int) -> Trajectory:
        async with bench.pool.session(replace(task, env_id="Sleeping-v0")) as session:
            await session.reset(seed=task.seed)
            for turn, (_, environment_s) in enumerate(PROFILE.turns(task.index, member)):
                priority = task.index // PROFILE.groups if schedule.by_step else 0
                await queue.generate(bench.request(f"{task.index}-{member}-{turn}", priority))
                await session.step(f"{environment_s * bench.speed:.6f}")
        return Trajectory(task, member, attempt, outcome=TrajectoryOutcome.SOLVED)

    scheduler = RolloutScheduler(
        CountingSource(),
        AdmissionWindow(PROFILE.groups, schedule.staleness),
        play,
        GroupPlan(PROFILE.group_size, 0, 1, 3600.0),
        Ledger(),
        EpisodeSlots(),
    )
    began = time.monotonic()
    turns = 0
    for version in range(steps):
        groups = (await scheduler.next_groups(version)).kept
        await asyncio.sleep(PROFILE.train_s * bench.speed)
        for group in groups:
            turns += sum(len(PROFILE.turns(group.index, played.member)) for played in group.trajectories)
            scheduler.release(group)
    total_s = time.monotonic() - began
    await scheduler.close()
    return {
        "steps": steps,
        "total_s": total_s,
        "step_s": total_s / steps,
        "tokens": turns * TOKENS,
        "turns_a_second": turns / total_s,
    }


async def measure(
    options: argparse.Namespace, ideals: dict[int, float], inference_url: str, env_url: str
) -> dict[str, object]:
    """Measure the engine alone, then every schedule; `ideals` are their shares of the bound on the virtual clock."""
    results: dict[str, object] = {}
    async with (
        ServerClient(inference_url, "vllm", way=None, patience_s=600.0) as client,
        EnvironmentPool(env_url, None, "msgpack") as pool,
    ):
        bench = Bench(client, pool, options.speed)
        fastest = PROFILE.slots / options.step_s
        runs: dict[int, list[dict[str, float]]] = {staleness: [] for staleness in ideals}
        for number in range(options.rounds):
            for staleness, ideal in ideals.items():
                row = await measure_run(bench, staleness, options)
                runs[staleness].append(row)
                print(
                    f"round {number + 1}, staleness {staleness}: {row['step_s']:.1f} s a step, {row['of_bound']:.1%} "
                    f"of the bound (virtual clock: {ideal:.1%}); engine alone {row['tokens_per_s_alone']:.0f} of at "
                    f"most {fastest:.0f} tokens/s, load {row['load']:.1f}{'' if is_quiet(row) else ', NOT QUIET'}",
                    flush=True,
                )
    for staleness, rows in runs.items():
        quiet = [row for row in rows if is_quiet(row)] or rows
        middle = sorted(quiet, key=lambda row: row["of_bound"])[len(quiet) // 2]
        results[f"staleness {staleness}"] = {
            **middle,
            "of_bound_on_the_virtual_clock": ideals[staleness],
            "quiet_runs": sum(map(is_quiet, rows)),
            "runs": rows,
        }
    return results


async def measure_run(bench: Bench, staleness: int, options: argparse.Namespace) -> dict[str, float]:
    """Take the steps of one schedule, between two measurements of the engine alone."""
    load = os.getloadavg()[0]
    before = await rate_when_full(bench, 10 * options.speed)
    row = await play_steps(bench, Schedule("", staleness), options.steps)
    after = await rate_when_full(bench, 10 * options.speed)
    rate = max(before, after)
    bound_s = max(row["tokens"] / rate, options.steps * PROFILE.train_s * bench.speed)
    return row | {
        "of_bound": bound_s / row["total_s"],
        "tokens_per_s_alone": rate,
        "rate_before": before,
        "rate_after": after,
        "load": load,
    }


def is_quiet(row: dict[str, float]) -> bool:
    """Whether the engine was equally fast before and after a run."""
    return min(row["rate_before"], row["rate_after"]) >= 0.95 * row["tokens_per_s_alone"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--speed", type=float, default=0.5, help="times of the profile are multiplied by this"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2], help="the schedules")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.step_s = 0.5 * options.speed / TOKENS
    ideals = {}
    for staleness in options.staleness:
        virtual = run_virtually(play_run(PROFILE, Schedule("", staleness), options.steps))
        ideals[staleness] = virtual.bound_s / virtual.total_s
    sleeping = "Sleeping-v0=benchmarks.rollout.sleeping_env:Sleeping"
    served = ["--env", sleeping, "--isolation", "Sleeping-v0=thread", "--threads", "512"]
    server = InferenceServerProcess("vllm", "--max-rows", str(PROFILE.slots), "--step-s", str(options.step_s))
    with server, env_server(*served) as env_url:
        results = asyncio.run(measure(options, ideals, server.url, env_url))
    if options.output:
        commit = revision()
        record = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit,
            "load": os.getloadavg(),
            "results": results,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
