"""Environments with one defect each; `Sums` has none."""

import math
import random
import re
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rollgym.clients.protocol.spaces import UnicodeText

ROUNDS = 3


class Sums(gymnasium.Env):
    """Three sums, one a turn. Solved if all are right; each pays a third."""

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": [],
        "deterministic": True,
        "expert": True,
        "max_episode_steps": ROUNDS,
        "version": "1",
    }

    def __init__(self) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.expert = False
        self.one = self.other = self.round = self.right = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.expert = bool((options or {}).get("expert"))
        self.round = self.right = 0
        self.draw()
        info = self.info(valid=True) | {"instruction": "Reply with the sum of the two numbers."}
        return self.observe(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        right = self.is_right(action)
        self.right += right
        self.round += 1
        valid = isinstance(action, str) and action.strip().isdecimal()
        self.draw()
        return self.observe(), self.pay(right), self.over(), False, self.info(valid=valid)

    # -- what a defect changes -----------------------------------------------------------------------------------

    def draw(self) -> None:
        self.one, self.other = (int(each) for each in self.np_random.integers(10, 50, 2))

    def observe(self) -> Any:
        return f"{self.one} and {self.other}"

    def is_right(self, action: Any) -> bool:
        return str(action).strip() == str(self.one + self.other)

    def pay(self, right: bool) -> float:
        return right / ROUNDS

    def over(self) -> bool:
        return self.round == ROUNDS

    def solved(self) -> bool:
        return self.round == ROUNDS and self.right == ROUNDS

    def info(self, *, valid: bool) -> dict[str, Any]:
        info: dict[str, Any] = {"success": self.solved(), "action_is_valid": valid}
        if self.expert:
            info["expert_action"] = str(self.one + self.other)
        return info


# -- determinism ---------------------------------------------------------------------------------------------------


class UnseededReset(Sums):
    def draw(self) -> None:
        self.one, self.other = (int(each) for each in np.random.default_rng().integers(10, 50, 2))


class GlobalGenerator(Sums):
    """Seeds the global generator, which all sessions of a process draw from."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        random.seed(seed)
        return super().reset(seed=seed, options=options)

    def draw(self) -> None:
        self.one, self.other = random.randrange(10, 50), random.randrange(10, 50)


class ClassCounter(Sums):
    """What one session does, the next one sees."""

    resets: ClassVar[int] = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        type(self).resets += 1
        return super().reset(seed=seed, options=options)

    def observe(self) -> str:
        return f"{super().observe()} (game {self.resets})"


class KeepsItsPast(Sums):
    """An episode leaves something behind for the next one of its session."""

    offset = 0

    def draw(self) -> None:
        super().draw()
        self.offset += 1
        self.one += self.offset


class PaysLessLater(Sums):
    """The reward depends on the number of resets."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def pay(self, right: bool) -> float:
        return right / ROUNDS - 0.001 * min(self.resets, 10)


class HashSeed(Sums):
    def draw(self) -> None:
        super().draw()
        self.one += hash(f"task {self.one}") % 7


class Clock(Sums):
    """Who takes long is paid less."""

    begun = 0.0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self.begun = time.monotonic()
        return super().reset(seed=seed, options=options)

    def pay(self, right: bool) -> float:
        return right / ROUNDS - (0.25 if time.monotonic() - self.begun > 0.28 else 0.0)


class Modest(Sums):
    """Does not say that it is deterministic."""

    metadata: ClassVar[dict[str, Any]] = Sums.metadata | {"deterministic": False}


class Honest(UnseededReset):
    """Is not deterministic, and says so."""

    metadata: ClassVar[dict[str, Any]] = Sums.metadata | {"deterministic": False}


# -- answers -------------------------------------------------------------------------------------------------------


class AnswerInObservation(Sums):
    def observe(self) -> str:
        return f"{super().observe()} make {self.one + self.other}."


class PointsTheWay(Sums):
    """Numbers in, numbers out, and the last one is the action that is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(100)
        self.observation_space = spaces.Box(0, 100, (3,), np.float32)

    def observe(self) -> Any:
        return np.array([self.one, self.other, self.one + self.other], np.float32)

    def info(self, *, valid: bool) -> dict[str, Any]:
        info = super().info(valid=True)
        return info | {"expert_action": int(info["expert_action"])} if self.expert else info


class AnswerInInfo(Sums):
    def info(self, *, valid: bool) -> dict[str, Any]:
        return super().info(valid=valid) | {"debug": {"target": self.one + self.other}}


class SolutionInInfo(Sums):
    """All answers at once, in the order of the turns."""

    def draw(self) -> None:
        if self.round == 0:
            self.tasks = [
                [int(each) for each in pair] for pair in self.np_random.integers(10, 50, (ROUNDS + 1, 2))
            ]
        self.one, self.other = self.tasks[self.round]

    def info(self, *, valid: bool) -> dict[str, Any]:
        return super().info(valid=valid) | {"plan": " ".join(str(sum(pair)) for pair in self.tasks)}


class AnswerInState(Sums):
    def info(self, *, valid: bool) -> dict[str, Any]:
        return super().info(valid=valid) | {"state": {"answer": str(self.one + self.other)}}


# -- who is paid ---------------------------------------------------------------------------------------------------


class PaysAConstant(Sums):
    def is_right(self, action: Any) -> bool:
        return super().is_right(action) or "yes" in str(action)


class PaysEcho(Sums):
    def is_right(self, action: Any) -> bool:
        return super().is_right(action) or str(action) == self.observe()


class PaysSilence(Sums):
    def is_right(self, action: Any) -> bool:
        return super().is_right(action) or not str(action)


class OneTask(Sums):
    """Every seed draws the same."""

    def draw(self) -> None:
        self.one, self.other = 20 + self.round, 30


class TooEasy(Sums):
    """Most answers are right."""

    def is_right(self, action: Any) -> bool:
        return str(action).isdecimal() and int(action) != self.one


# -- rewards and success -------------------------------------------------------------------------------------------


class NotANumber(Sums):
    def pay(self, right: bool) -> float:
        return math.nan if self.one % 5 == 0 else super().pay(right)


class BeyondItsRange(Sums):
    metadata: ClassVar[dict[str, Any]] = Sums.metadata | {"reward_range": [0.0, 1.0]}

    def pay(self, right: bool) -> float:
        return 5.0 * right


class PaysAnyway(Sums):
    def pay(self, right: bool) -> float:
        return 0.5


class PaysFailure(Sums):
    def pay(self, right: bool) -> float:
        return float(not right)


class AlwaysSuccess(Sums):
    def solved(self) -> bool:
        return self.round == ROUNDS


class SolvedBeforeItBegins(Sums):
    def solved(self) -> bool:
        return super().solved() or self.round == 0


# -- conformance ---------------------------------------------------------------------------------------------------


class OutOfSpace(Sums):
    """A Box whose bound some observations exceed."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 45, (2,), np.float32)

    def observe(self) -> Any:
        return np.array([self.one, self.other], np.float32)


class GoesOn(Sums):
    """Does not end where it says."""

    def over(self) -> bool:
        return self.round == 2 * ROUNDS

    def solved(self) -> bool:
        return self.round == 2 * ROUNDS and self.right == 2 * ROUNDS


class LimitAsTheEnd(Sums):
    """Is over when one sum is right; its limit terminates."""

    def over(self) -> bool:
        return self.right > 0 or self.round == ROUNDS

    def solved(self) -> bool:
        return self.right > 0


class NeverEnds(Sums):
    metadata: ClassVar[dict[str, Any]] = Sums.metadata | {"max_episode_steps": None, "expert": False}

    def over(self) -> bool:
        return False


class AnythingIsValid(Sums):
    def info(self, *, valid: bool) -> dict[str, Any]:
        listed = [str(number) for number in range(20, 99, 13)]
        return super().info(valid=True) | {"available_actions": listed}


class RaisesOnOddReplies(Sums):
    def is_right(self, action: Any) -> bool:
        if len(action) > 1_000:
            raise ValueError("too long")
        return super().is_right(action)


class SaysNothing(Sums):
    """No instruction, no success."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        observation, info = super().reset(seed=seed, options=options)
        del info["instruction"]
        return observation, info

    def info(self, *, valid: bool) -> dict[str, Any]:
        info = super().info(valid=valid)
        del info["success"]
        return info


# -- costs ---------------------------------------------------------------------------------------------------------


class Hoards(Sums):
    """Keeps something of every episode."""

    hoard: ClassVar[list[bytearray]] = []

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self.hoard.append(bytearray(b"x" * 200_000))
        return super().reset(seed=seed, options=options)


class LooksBack(Sums):
    """Reads a reply with a pattern that begins anew at every mark."""

    metadata: ClassVar[dict[str, Any]] = Sums.metadata | {"inline": True}
    served_inline = True

    def is_right(self, action: Any) -> bool:
        found = re.findall(r"a(.*?)z", str(action), re.DOTALL)
        return super().is_right(found[-1] if found else action)


class BroodsAtReset(Sums):
    """Takes its time for some tasks, in the process that serves everybody."""

    metadata: ClassVar[dict[str, Any]] = Sums.metadata | {"inline": True}
    served_inline = True

    def draw(self) -> None:
        super().draw()
        if self.round == 0 and self.one % 3 == 0:
            begun = time.process_time()
            # So long that a machine at a tenth of its speed would not excuse it.
            while time.process_time() - begun < 0.6:
                self.one += 0


class SleepsAtReset(Sums):
    """Waits for something before some tasks, and has everybody wait with it."""

    metadata: ClassVar[dict[str, Any]] = Sums.metadata | {"inline": True}
    served_inline = True

    def draw(self) -> None:
        super().draw()
        if self.round == 0 and self.one % 3 == 0:
            time.sleep(0.6)
