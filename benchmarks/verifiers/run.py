"""Verdicts a second of the verifiers on one core, and of Math-Verify called directly, with what they agree on.

    ROLLGYM_DATA=.../data python benchmarks/verifiers/run.py [--rounds 3] [--out benchmarks/results/verifiers.json]

Every figure is items over CPU seconds, the best of the rounds (others may use the machine): for what works in a process
of its own, that of this process and of that one together. What is fast is scored in more rounds. The recorded
solutions and Math-Verify's test suite are read where ROLLGYM_DATA says (or from ../shared/data), and left out where
they are absent; the other items are generated.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollgym.clients.measuring.revision import revision
from rollgym.envs.verifiers.base import VerifierEnv
from rollgym.envs.verifiers.mathematics import MathEnv
from rollgym.envs.verifiers.multiple_choice import MultipleChoiceEnv
from rollgym.envs.verifiers.question_answering import QuestionAnsweringEnv
from rollgym.envs.verifiers.reasoning_gym import ReasoningGymEnv

ROOT = Path(__file__).parents[2]
OPTIONS = ("match_types", "boxed_match_priority", "float_rounding", "strict", "allow_set_relation_comp")
_MOST_ROUNDS, _FAST_S = 30, 2.0
Item = tuple[str, dict[str, Any]]
THOUGHTS = "<think>" + "First I look at the numbers, then at what is asked. " * 10 + "</think>"


def recorded(name: str) -> list[dict[str, Any]]:
    folder = Path(os.environ.get("ROLLGYM_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / name).exists():
        return []
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def generated(environment: VerifierEnv, write: str, count: int) -> list[Item]:
    """Responses to generated tasks, every second one with the answer of another."""
    tasks = [
        environment.reset(seed=seed, options={"expert": True})[1]["state"]["task"] for seed in range(count)
    ]
    answers = [tasks[number - number % 2]["answer"] for number in range(count)]
    return [
        (f"{THOUGHTS}So the answer is:\n{write.format(answer)}", task)
        for answer, task in zip(answers, tasks, strict=True)
    ]


def child_cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of other processes, from /proc."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(
    items: Sequence[Item],
    judge: Callable[[str, Mapping[str, Any]], str],
    rounds: int,
    pids: Callable[[], list[int]],
) -> dict[str, Any]:
    for response, task in items[:20]:
        judge(response, task)
    rates, slowest = [], []
    outcomes: Counter[str] = Counter()
    total = 0.0
    while len(rates) < rounds or (len(rates) < _MOST_ROUNDS and total < _FAST_S):
        before = time.process_time() + child_cpu_s(pids())
        outcomes.clear()
        times = []
        for response, task in items:
            begun = time.perf_counter()
            outcomes[judge(response, task)] += 1
            times.append(time.perf_counter() - begun)
        spent = time.process_time() + child_cpu_s(pids()) - before
        total += spent
        rates.append(len(items) / spent)
        slowest.append(sorted(times)[int(0.99 * (len(times) - 1))])
    return {
        "items": len(items),
        "verdicts_per_cpu_s": round(max(rates)),
        "p99_ms": round(1e3 * min(slowest), 3),
        "outcomes": dict(sorted(outcomes.items())),
    }


def upstream(response: str, task: Mapping[str, Any]) -> str:
    """Math-Verify as it is called by itself, with its own time-outs (signals, so in the main thread only)."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold, types = task["answer"], task.get("match_types", ["latex", "expr"])
    if "question" in task:
        # It finds bare LaTeX less often: references of its own test suite stand in dollars.
        gold = f"${gold}$"
    targets: list[Any] = []
    if "latex" in types:
        targets.append(LatexExtractionConfig(boxed_match_priority=0))
    if "expr" in types:
        targets.append(ExprExtractionConfig())
    equal = verify(
        parse(gold, targets),
        parse(response, targets),
        float_rounding=task.get("float_rounding", 6),
        strict=task.get("strict", True),
        allow_set_relation_comp=task.get("allow_set_relation_comp", False),
    )
    return "correct" if equal else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    alone, backed = MathEnv(backend="none"), MathEnv(backend="math-verify", timeout_s=30)
    choice, short, gym = MultipleChoiceEnv(), QuestionAnsweringEnv(), ReasoningGymEnv()
    solutions = [
        (case["response"], {"answer": case["gold"]}) for case in recorded("gsm8k_labelled_solutions.jsonl")
    ]
    suite = [
        (case["pred"], {"answer": case["gold"]} | {name: case[name] for name in OPTIONS})
        for case in recorded("math_verify_testsuite.jsonl")
    ]
    formulas = generated(alone, "$\\boxed{{{}}}$", 300)
    choices, questions = generated(choice, "\\boxed{{{}}}", 300), generated(short, "<answer>{}</answer>", 300)
    sums = generated(gym, "<answer>{}</answer>", 200)
    none: list[int] = []

    def scorer(verifier: VerifierEnv) -> Callable[[str, Mapping[str, Any]], str]:
        return lambda response, task: verifier.score(response, task).outcome

    def processes(verifier: MathEnv | ReasoningGymEnv) -> Callable[[], list[int]]:
        if isinstance(verifier, MathEnv):
            return lambda: verifier._symbolic.pids() if verifier._symbolic is not None else none
        return verifier._share.pool.pids

    cases: list[tuple[str, str, Sequence[Item], Callable[..., str], Callable[[], list[int]]]] = [
        ("grade school solutions (recorded)", "Math-v0, arithmetic", solutions, scorer(alone), lambda: none),
        ("grade school solutions (recorded)", "Math-Verify", solutions, upstream, lambda: none),
        ("generated mathematics", "Math-v0, arithmetic", formulas, scorer(alone), lambda: none),
        ("generated mathematics", "Math-Verify", formulas, upstream, lambda: none),
        ("Math-Verify's test suite (recorded)", "Math-v0, arithmetic", suite, scorer(alone), lambda: none),
        ("Math-Verify's test suite (recorded)", "Math-v0, both", suite, scorer(backed), processes(backed)),
        ("generated choices", "MultipleChoice-v0", choices, scorer(choice), lambda: none),
        ("generated short answers", "QA-v0", questions, scorer(short), lambda: none),
        ("reasoning-gym, chain_sum", "ReasoningGym-v0", sums, scorer(gym), processes(gym)),
    ]  # fmt: skip
    rows = []
    for data, who, items, judge, pids in cases:
        if not items:
            continue
        found = measure(items, judge, options.rounds, pids)
        rows.append({"items_from": data, "scored_by": who, **found})
        print(
            f"{data:38} {who:32} {found['verdicts_per_cpu_s']:>7,}/s  p99 {found['p99_ms']} ms  {found['outcomes']}"
        )
    if solutions:
        labels = [case["is_correct"] for case in recorded("gsm8k_labelled_solutions.jsonl")]
        said = [alone.score(*item).outcome == "correct" for item in solutions]
        print(f"labels of the solutions agreed with: {sum(map(bool.__eq__, labels, said))} of {len(labels)}")
    for each in (backed, gym):
        each.close()
    if options.out is not None:
        commit = revision()
        result = {
            "command": f"python benchmarks/verifiers/run.py --rounds {options.rounds}",
            "commit": commit,
            "math_verify": version("math-verify"),
            "reasoning_gym": version("reasoning-gym"),
            "load_average": round(os.getloadavg()[0], 2),
            "rounds": options.rounds,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
