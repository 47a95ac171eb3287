"""An environment of one's own: `roll-serve --env examples.custom_environment:Countdown` serves it."""

import gymnasium

from rollgym import UnicodeText


class Countdown(gymnasium.Env):
    """Say the number that is one less, down to zero."""

    metadata = {"deterministic": True, "description": "Count down.", "max_episode_steps": 20}

    def __init__(self):
        self.action_space = self.observation_space = UnicodeText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.steps = int(self.np_random.integers(2, 10)), 0
        return str(self.number), {"instruction": "Reply with the number that is one less.", "success": False}

    def step(self, action):
        right = action.strip() == str(self.number - 1)
        self.number, self.steps = self.number - right, self.steps + 1
        done = self.number == 0
        info = {"success": done, "action_is_valid": right}
        return str(self.number), float(right), done, self.steps == 20 and not done, info
