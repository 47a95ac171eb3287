"""An environment of one's own: `roll-serve --env examples.custom_environment:Countdown` serves it."""

import gymnasium

from rollgym import UnicodeText


class Countdown(gymnasium.Env):
    """Say the number that is one less, down to zero."""

    metadata = {"deterministic": True, "inline": True, "description": "Count down to zero."}

    def __init__(self):
        self.action_space = self.observation_space = UnicodeText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(2, 10))
        return str(self.number), {"instruction": "Reply with the number that is one less.", "success": False}

    def step(self, action):
        right = action.strip() == str(self.number - 1)
        self.number -= right
        done = self.number == 0
        return str(self.number), float(done), done, False, {"success": done, "action_is_valid": right}
