"""What the tests of the rollout log play: an environment that nobody can repeat, and an agent of a user's."""

import random
from typing import Any, ClassVar

import gymnasium

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.actors import View


class NoisyEcho(gymnasium.Env[str, str]):
    """Shows all that it was told, with chances in between that no seed governs; ends after nine steps."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "deterministic": False, "inline": True}
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"breaks_at": {"type": "integer"}},
        "additionalProperties": False,
    }

    def __init__(self, breaks_at: int = -1) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._breaks_at = breaks_at
        self._shown = ""
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._shown, self._steps = str(random.random()), 0
        return self._shown, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._steps == self._breaks_at:
            raise RuntimeError("broken")
        self._steps += 1
        self._shown += f" {action} {random.random()}"
        return self._shown, 0.5, self._steps == 9, False, {}


async def patient_agent(
    session: Any, task: Any, member: int, actor: Any, max_turns: int, attempt: int
) -> Trajectory:
    """Play as the trainer does, and look at the state before every other turn."""
    trajectory = Trajectory(task, member, attempt)
    observation, info = await session.reset(seed=task.seed)
    assert (session.env_id, session.seed, session.episode >= 0) == (task.env_id, task.seed, True)
    actor.begin(info)
    for number in range(max_turns):
        assert session.step_index == number, "also where steps come from the log"
        if number % 2:
            assert await session.render() is not None
        turn = await actor.act(
            trajectory, View(number, observation, ({"role": "user", "content": observation},), info)
        )
        trajectory.turns.append(turn)
        observation, turn.reward, terminated, truncated, info = await session.step(turn.reply)
        if terminated or truncated:
            trajectory.outcome = TrajectoryOutcome.SOLVED if turn.reward > 0 else TrajectoryOutcome.FAILED
            break
    return trajectory
