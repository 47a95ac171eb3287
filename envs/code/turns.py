"""What the environments of several turns in a sandbox have in common."""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.envs.core.kwargs import DeclaredKwargs


@dataclass(frozen=True, slots=True)
class ReplyTurn:
    """What a reply has led to.

    Attributes:
        observation: What the policy sees.
        reward: What the turn is worth, without the penalty of an unreadable reply.
        terminated: Whether the task has ended.
        success: Whether it is solved.
        valid: Whether the reply could be read.
    """

    observation: str
    reward: float = 0.0
    terminated: bool = False
    success: bool = False
    valid: bool = True


class TurnEnv(DeclaredKwargs, gymnasium.Env[str, str]):
    """Base of environments in which programs are run turn by turn."""

    metadata: dict[str, Any] = {
        "observation": "The task; then what the last turn printed.",
        "actions": "A fenced block of code.",
        "reward": "1 where the goal is reached, else 0; `format_penalty` for a reply that cannot be read.",
        "render_modes": ["ansi"],
        "render_fps": 1,
        "kind": "episodic",
        "expert": True,
        "metrics": {"steps": "last", "invalid_replies": "last"},
        "version": "0",
    }

    def __init__(self, *, max_turns: int, format_penalty: float, render_mode: str | None) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.render_mode = render_mode
        self._limit = max_turns
        self._penalty = float(format_penalty)
        self._expert = False
        self._turns = 0
        self._invalid = 0
        self._seen = ""

    # -- what an environment implements --------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, options: Mapping[str, Any]) -> str:
        """Set up an episode from `self.np_random` and the reset's options; return the first observation."""

    @abstractmethod
    def _take(self, reply: str, *, last: bool) -> ReplyTurn:
        """Do what a reply says; `last` tells that it is the last one."""

    @abstractmethod
    def _instruction(self) -> str:
        """Return what the task is, and how to reply."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return what viewers may see of the state."""

    @abstractmethod
    def _expert_action(self) -> str | None:
        """Return a good reply; None if none is known."""

    @abstractmethod
    def _optimal_steps(self) -> int | None:
        """Return the least number of turns; None if it is not known."""

    # -- Gymnasium -----------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode. The option `expert` puts a good reply into `info` on each turn."""
        super().reset(seed=seed)
        given = dict(options or {})
        self._expert = bool(given.pop("expert", False))
        self._turns = self._invalid = 0
        self._seen = self._begin(given)
        info = self._info(ReplyTurn(self._seen), penalty=0.0)
        info["instruction"] = self._instruction()
        info["optimal_steps"] = self._optimal_steps()
        return self._seen, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do what a reply says."""
        self._turns += 1
        turn = self._take(action, last=self._turns >= self._limit)
        self._invalid += not turn.valid
        penalty = 0.0 if turn.valid else self._penalty
        self._seen = turn.observation
        truncated = not turn.terminated and self._turns >= self._limit
        info = self._info(turn, penalty=penalty)
        return turn.observation, turn.reward + penalty, turn.terminated, truncated, info

    def render(self) -> Any:
        """Return what the policy saw last."""
        return self._seen if self.render_mode == "ansi" else None

    def _info(self, turn: ReplyTurn, *, penalty: float) -> dict[str, Any]:
        digest = hashlib.blake2b(turn.observation.encode(errors="replace"), digest_size=8).hexdigest()
        info: dict[str, Any] = {
            "success": turn.success,
            "action_is_valid": turn.valid,
            "format_penalty": penalty,
            "env_reward": turn.reward,
            "metrics": {"steps": self._turns, "invalid_replies": self._invalid},
            "state": self._state(),
            "anchor": f"{self._turns}:{digest}",
        }
        if self._expert and (reply := self._expert_action()) is not None:
            info["expert_action"] = reply
        return info


def cut(text: str, characters: int) -> str:
    """Shorten a text in its middle, saying so."""
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters are left out ...]\n{text[-half:]}"
