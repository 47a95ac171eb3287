"""Faults in the server's answers, recorded during play."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gymnasium import Space

from rollgym.clients.protocol.errors import ProblemError


class Watch:
    """Looks at every observation, reward and info of the audit.

    Attributes:
        looks: How many were looked at.
        steps: How many of them were steps.
        lowest: The lowest finite reward.
        highest: The highest finite reward.
    """

    def __init__(self) -> None:
        self._notes: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}
        self.looks = 0
        self.steps = 0
        self.lowest = math.inf
        self.highest = -math.inf

    def note(self, kind: str, where: str) -> None:
        """Remember that something was seen; the first few places are kept."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        notes = self._notes.setdefault(kind, [])
        if len(notes) < 3:
            notes.append(where)

    def count(self, kind: str) -> int:
        """How often something was seen."""
        return self._counts.get(kind, 0)

    def first(self, kind: str) -> str:
        """The first place of a fault, and how often it occurred in all."""
        count = self.count(kind)
        if not count:
            return ""
        return self._notes[kind][0] + (f" (and {count - 1} times more)" if count > 1 else "")

    def begun(self, where: str, space: Space[Any], observation: Any, info: Mapping[str, Any]) -> None:
        """Check the observation and the info of a reset."""
        self._look(where, space, observation)
        instruction = info.get("instruction")
        if not isinstance(instruction, str) or not instruction.strip():
            self.note("no instruction", f"{where} gives {instruction!r}")
        if info.get("success") is True:
            self.note("success at the reset", where)

    def stepped(
        self,
        where: str,
        space: Space[Any],
        observation: Any,
        reward: float,
        ended: bool,
        info: Mapping[str, Any],
    ) -> None:
        """Check the observation, the reward and the info of a step."""
        self._look(where, space, observation)
        self.steps += 1
        if not math.isfinite(reward):
            self.note("reward not finite", f"{where} pays {reward}")
        else:
            self.lowest = min(self.lowest, reward)
            self.highest = max(self.highest, reward)
        if ended and type(info.get("success")) is not bool:
            self.note("no success", f"{where} ends with {info.get('success')!r}")

    def failed(self, where: str, problem: ProblemError) -> None:
        """Check the problem that the server returns in place of an answer."""
        if problem.code == "env_error" and "reward" in problem.detail:
            self.note("reward not finite", f"{where}: {problem.detail}")
        else:
            self.note("broke off", f"{where}: {problem}")

    def _look(self, where: str, space: Space[Any], observation: Any) -> None:
        self.looks += 1
        if observation not in space:
            text = repr(observation)
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            self.note("observation out of the space", f"{where} gives {shown}")
