"""Every data set of reasoning-gym through ReasoningGym-v0: whether it pays its own answers, and junk nothing.

python benchmarks/verifiers/data_sets.py
"""

import time
from collections import defaultdict

from reasoning_gym.factory import DATASETS

from rollgym.envs.verifiers.reasoning_gym import ReasoningGymEnv

JUNK = ("no idea", "<answer>∞×@</answer>", "<answer>[[1, 'x'</answer>", "0")


def judge(environment: ReasoningGymEnv, name: str) -> str:
    try:
        environment.reset(options={"dataset": name, "seed": 1})
    except (ValueError, TimeoutError, RuntimeError) as refused:
        return f"gives no task: {str(refused)[:100]}"
    task = environment.task
    if task["answer"] is None:
        return "has no reference answer"
    own = environment.score(f"<answer>{task['answer']}</answer>", task)
    if own.outcome != "correct":
        return f"does not pay its own answer in full: {own.outcome} {own.score:g}"
    faults = [said for said in JUNK if environment.score(said, task).outcome in ("error", "timeout")]
    paid = [said for said in JUNK if environment.score(said, task).score >= 0.5 and said != task["answer"]]
    if faults or paid:
        return f"faults {faults}, paid {paid}"
    return "pays its own answer, and junk nothing"


def main() -> None:
    environment = ReasoningGymEnv(timeout_s=30)
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(DATASETS):
        begun = time.monotonic()
        said = judge(environment, name)
        spent = time.monotonic() - begun
        found[said].append(name if spent < 2 else f"{name} ({spent:.0f} s)")
    environment.close()
    for said, names in sorted(found.items(), key=lambda each: -len(each[1])):
        print(f"{len(names):3} {said}: {', '.join(names)}")


if __name__ == "__main__":
    main()
