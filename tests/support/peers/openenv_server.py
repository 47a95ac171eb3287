"""A guessing game on OpenEnv's own server, at /many, and at /single with room for one session: the port."""

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

MOST_GUESSES = 5


class GuessAction(Action):
    guess: int


class GuessObservation(Observation):
    hint: str
    left: int = MOST_GUESSES


class Guess(Environment[GuessAction, GuessObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = self._guesses = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, low: int = 0, **_: Any
    ) -> GuessObservation:
        self._secret, self._guesses = low + (seed or 0) % 10, 0
        return GuessObservation(hint=f"a number from {low} to {low + 9}")

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any) -> GuessObservation:
        if action.guess < 0:
            raise ValueError("it is not negative")
        self._guesses += 1
        right = action.guess == self._secret
        last = self._guesses == MOST_GUESSES
        return GuessObservation(
            hint="yes" if right else "no",
            left=MOST_GUESSES - self._guesses,
            reward=1.0 if right else 0.0,
            done=right or last,
            metadata={"truncated": True} if last and not right else {},
        )

    @property
    def state(self) -> State:
        return State(step_count=self._guesses)


if __name__ == "__main__":
    app = FastAPI()
    for path, sessions in (("/many", 8), ("/single", 1)):
        served = create_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=sessions)
        app.mount(path, served)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
