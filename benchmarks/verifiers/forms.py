"""Verdicts a second on instructions, on form, and by a judge.

    python benchmarks/verifiers/forms.py [--rounds 5] [--out benchmarks/results/verifier_forms.json]

Instructions and form: CPU time of the verifier alone, in this process, on drawn tasks with responses that are right,
which costs most, and on the recorded responses to IFEval's prompts where ROLLGYM_DATA says where those are. The judge:
verdicts a second of a real server, whose judge is a double on loopback that takes a time of our choosing for a reply.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollgym.clients.client.client import EnvClient
from rollgym.clients.measuring.revision import revision
from rollgym.envs.verifiers.base import VerifierEnv
from rollgym.envs.verifiers.formats.environment import FAMILIES, FormatEnv
from rollgym.envs.verifiers.instructions.environment import InstructionFollowingEnv
from tests.support import form_answers, instruction_answers
from tests.support.judge_double import JudgeDouble, honest
from tests.support.processes import env_server

ROOT = Path(__file__).parents[2]
TASKS = 200
BATCH = 64
JUDGED = 256


def drawn(environment: VerifierEnv, answers: Any) -> list[tuple[str, dict[str, Any]]]:
    tasks = [
        environment.reset(seed=seed, options={"expert": True})[1]["state"]["task"] for seed in range(TASKS)
    ]
    return [(answers.answer(task), task) for task in tasks]


def recorded() -> list[tuple[str, dict[str, Any]]]:
    path = Path(os.environ.get("ROLLGYM_DATA", ROOT.parent / "shared" / "data")) / "ifeval_cases.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("prompt", "instruction_id_list", "kwargs")
    return [(row["response"], {name: row[name] for name in names}) for row in rows]


def cases() -> Iterator[tuple[str, VerifierEnv, list[tuple[str, dict[str, Any]]]]]:
    following = InstructionFollowingEnv()
    yield "instructions, drawn, strict and loose", following, drawn(following, instruction_answers)
    if found := recorded():
        yield "instructions, IFEval, strict and loose", following, found
    for family in FAMILIES:
        environment = FormatEnv(families=[family])
        yield f"form, {family}", environment, drawn(environment, form_answers)


def cost(environment: VerifierEnv, items: list[tuple[str, dict[str, Any]]], seconds: float) -> float:
    """CPU µs a verdict."""
    for response, task in items:
        environment.score(response, task)
    count, begun = 0, time.process_time()
    while time.process_time() - begun < seconds:
        for response, task in items:
            environment.score(response, task)
        count += len(items)
    return 1e6 * (time.process_time() - begun) / count


async def judged(url: str, first: int) -> float:
    """Verdicts a second of a server; each response is a new one, so that none is known already."""
    items = [
        {"question": "Which number?", "reference": "0", "response": str(first + number)}
        for number in range(JUDGED)
    ]
    begun = time.perf_counter()
    async with EnvClient(url) as client:
        for start in range(0, JUDGED, BATCH):
            verdicts = await client.verify("Judge-v0", items[start : start + BATCH])
            if {verdict.outcome for verdict in verdicts} - {"correct", "wrong"}:
                raise RuntimeError(f"not judged: {verdicts[0]}")
    return JUDGED / (time.perf_counter() - begun)


def judge_rates(delay_s: float, rounds: int) -> list[float]:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        time.sleep(delay_s)
        return honest(body)

    with JudgeDouble(answer) as double:
        kwargs = json.dumps({"url": double.url, "model": "double"})
        with env_server("--operator-kwargs", f"Judge-v0={kwargs}", "--log-level", "error") as url:
            asyncio.run(judged(url, 10_000_000))
            return [asyncio.run(judged(url, 1 + number * JUDGED)) for number in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="CPU time of one measurement")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    commit = revision()
    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/verifiers/forms.py", *sys.argv[1:]]),
        "commit": commit,
        "load_average": os.getloadavg()[0],
        "rounds": options.rounds,
        "verifiers": [],
        "judge": [],
    }
    prepared = list(cases())
    costs = [
        [cost(environment, items, options.seconds) for _, environment, items in prepared]
        for _ in range(options.rounds)
    ]
    print("| verifier | CPU µs a verdict | verdicts/s of a core |\n| --- | ---: | ---: |")
    for (name, _, items), found in zip(prepared, zip(*costs, strict=True), strict=True):
        middle = statistics.median(found)
        result["verifiers"].append(
            {"what": name, "items": len(items), "cpu_us": middle, "spread": [min(found), max(found)]}
        )
        print(f"| {name} | {middle:,.1f} | {1e6 / middle:,.0f} |")
    print("\n| judge that takes | verdicts/s, batches of 64 |\n| --- | ---: |")
    for delay in (0.0, 0.25):
        rates = judge_rates(delay, options.rounds)
        result["judge"].append(
            {"delay_s": delay, "verdicts_per_s": statistics.median(rates), "spread": [min(rates), max(rates)]}
        )
        print(f"| {delay:g} s a reply | {statistics.median(rates):,.0f} |")
    result["load_average_at_end"] = os.getloadavg()[0]
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
