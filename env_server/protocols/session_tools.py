"""The tools of a session's environment, for the protocols that list and call tools: operations of our own protocol."""

from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.operations.operations import Calls
from rollgym.env_server.protocols.mcp_forms import call_as_action, own_tools
from rollgym.env_server.protocols.operating import operate
from rollgym.env_server.sessions.replies import Reply


class SessionTools:
    """Begins sessions of one environment, and lists and calls the tools that their episodes declare.

    This object keeps no state: it reads the tools from the answer of the episode's reset, which it requests again. So
    any I/O process and any gateway can answer.

    Args:
        operations: Carries out the operations on sessions.
        env_id: The environment.
    """

    def __init__(self, operations: Calls, env_id: str) -> None:
        self._operations = operations
        self._env_id = env_id

    async def begin(
        self, context: Context, *, kwargs: Mapping[str, Any] | None, seed: int | None = None
    ) -> tuple[str, Reply]:
        """Make a session and begin an episode, whose reset declares the tools.

        Returns:
            The session's id, and the answer to the reset.

        Raises:
            ProblemError: The session cannot be made, or its environment cannot be reset; no session is left then.
        """
        made = await operate(self._operations, context, "make", {"env_id": self._env_id, "kwargs": kwargs})
        session_id = str(made["session_id"])
        begin = {"session_id": session_id, "seed": seed, "request_id": reset_request_id(0)}
        begun = False
        try:
            reply = await operate(self._operations, context, "reset", begin)
            begun = True
        finally:
            if not begun:
                self._operations.end(context, session_id)
        return session_id, reply

    async def find(self, context: Context, session_id: str) -> Reply:
        """A session of this environment.

        Raises:
            ProblemError: `unknown_session` or `session_gone`.
        """
        session = await operate(self._operations, context, "session", {"session_id": session_id})
        if session["env_id"] != self._env_id:
            raise ProblemError("unknown_session", f"the session is not one of {self._env_id}")
        return session

    async def described(self, context: Context) -> Reply:
        """The `EnvInfo` of the session's environment."""
        return await operate(self._operations, context, "envs", {"env_id": self._env_id})

    async def begun(self, context: Context, session_id: str) -> Reply:
        """The answer of the reset of a session's episode; this begins no episode.

        Raises:
            ProblemError: `not_reset`, if there has been none, or its answer is not known any more.
        """
        again = {"session_id": session_id, "again": True}
        return await operate(self._operations, context, "reset", again)

    async def call(
        self, context: Context, session_id: str, name: str, arguments: Mapping[str, Any]
    ) -> Reply | None:
        """Call one of the environment's own tools, as a step whose action is the call in the environment's format.

        Returns:
            The answer to the step; None if the environment has no such tool.

        Raises:
            ProblemError: Any of a step's problems; `invalid_request`, if the format cannot hold the arguments.
        """
        info = (await self.begun(context, session_id))["info"]
        if name not in own_tools(info):
            return None
        action = call_as_action(info, name, arguments)
        return await operate(self._operations, context, "step", {"session_id": session_id, "action": action})


def reset_request_id(episode: int) -> str:
    """The request id of the reset that begins an episode, by which its answer can be requested again."""
    return f"tools-{episode}"
