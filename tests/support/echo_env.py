"""An environment that shows what it is told to."""

from typing import Any

import gymnasium
from gymnasium import spaces


class Echo(gymnasium.Env[Any, Any]):
    """Shows what it is told to and remembers what it was sent."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, action_space, observation_space=None, observation=0, **info):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Discrete(3)
        self.observation, self.info, self.taken = observation, info, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation, dict(self.info)

    def step(self, action):
        self.taken.append(action)
        return self.observation, 1.0, False, False, dict(self.info)
