"""On OpenEnv's own server: a guessing game at /many, and at /single with room for one session, and an MCP environment
at /echo: the port."""

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
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


class Echo(MCPEnvironment):
    """Made as OpenEnv's own `echo_env` is."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("echo")

        @tools.tool
        def echo_message(message: str) -> str:
            return message

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=0.0, metadata={"error": "unknown action"})

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = FastAPI()
    for path, sessions in (("/many", 8), ("/single", 1)):
        served = create_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=sessions)
        app.mount(path, served)
    app.mount("/echo", create_app(Echo, CallToolAction, CallToolObservation, max_concurrent_envs=8))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
