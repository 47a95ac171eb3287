"""McpTools: tasks that are done with the tools of an MCP server."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Unpack

from pydantic import Field

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.marks import last_tagged
from rollgym.envs.core.kwargs import OPERATOR
from rollgym.envs.core.splits import TaskSplit, checked_split, split_of_text
from rollgym.envs.tools.base import CallsPerTurn, StepLimit, ToolEnv, ToolKwargs, TurnResult, state_digest
from rollgym.envs.tools.mcp_server import McpServer, McpServerError, chosen_tools, parse_address
from rollgym.envs.tools.tasks import answers_agree
from rollgym.envs.tools.tool import Toolbox, ToolResult
from rollgym.user_paths import expand_user


@dataclass(frozen=True, slots=True)
class McpTask:
    """One task.

    Attributes:
        question: The question to the policy.
        answer: The expected answer; None if only checks count.
        setup: Calls that are made before the episode begins.
        checks: Calls that are made after its end, each with the text that it has to give.
    """

    question: str
    answer: str | None
    setup: tuple[ToolCall, ...]
    checks: tuple[tuple[ToolCall, str], ...]


class McpToolsEnv(ToolEnv):
    """Tasks for the tools of an MCP server, which the operator has chosen.

    The answer stands in `<answer>` tags of a reply without calls, and ends the episode: reward 1 if it is right and
    every check of the task passes, else 0.

    Raises:
        ValueError: If an argument is invalid.
        McpServerError: If the server cannot be reached.
    """

    metadata: dict[str, Any] = ToolEnv.metadata | {
        "description": "Tasks that are done with the tools of an MCP server.",
        "max_episode_steps": 16,
        "inline": False,
        # What a server keeps, and when it answers, is its own business.
        "deterministic": False,
        "forkable": False,
    }

    def __init__(
        self,
        *,
        server: Annotated[
            Mapping[str, Any] | None,
            OPERATOR,
            Field(
                description="The server: `command`, `args`, `env` and `cwd` of a program, or `url` and `headers`."
            ),
        ] = None,
        tasks: Annotated[
            Sequence[Mapping[str, Any]] | None,
            OPERATOR,
            Field(
                description=(
                    "Objects with a `question`, and `answer`, `setup` (calls: `name`, `arguments`) or "
                    "`checks` (calls with the text that they give, `equals`)."
                )
            ),
        ] = None,
        tasks_file: Annotated[
            str | None, OPERATOR, Field(description="The same as JSON lines, in place of `tasks`.")
        ] = None,
        tools: Annotated[
            Sequence[str] | None,
            OPERATOR,
            Field(
                description=(
                    "Names of the server's tools that the policy may use; null for all. Setup and checks "
                    "may use any."
                )
            ),
        ] = None,
        instruction: Annotated[
            str, OPERATOR, Field(description="What is said to the policy before the question.")
        ] = "Do the task with the help of the tools.",
        restart: Annotated[
            bool,
            OPERATOR,
            Field(
                description="Whether each episode has a connection of its own, and so a server that was started anew."
            ),
        ] = True,
        timeout_seconds: Annotated[
            float,
            OPERATOR,
            Field(gt=0, description="How long a start of the server, and each call, may take."),
        ] = 30.0,
        split: TaskSplit = None,
        max_calls_per_turn: CallsPerTurn = 8,
        max_episode_steps: StepLimit = 16,
        **common: Unpack[ToolKwargs],
    ) -> None:
        if server is None or (tasks is None) == (tasks_file is None):
            raise ValueError(
                "an environment of MCP tools needs `server`, and `tasks` or `tasks_file`; "
                "they are set where it is served, by operator_kwargs"
            )
        self._address = parse_address(server)
        self._tasks = _wanted_tasks(_parse_tasks(tasks, tasks_file), checked_split(split))
        self._names = tools
        self._said = instruction
        self._restart = restart
        self._seconds = timeout_seconds
        self._task = self._tasks[0]
        self._made: list[str] = []
        self._used = False
        self._server = McpServer(self._address, timeout_seconds)
        opened = False
        try:
            super().__init__(
                Toolbox(chosen_tools(self._server.tools, tools)),
                max_calls_per_turn=max_calls_per_turn,
                max_episode_steps=max_episode_steps,
                **common,
            )
            opened = True
        finally:
            if not opened:
                self._server.close()

    def close(self) -> None:
        """End the connection, and stop the server if it was started here."""
        self._server.close()
        super().close()

    # -- the episode -----------------------------------------------------------------------------------------------

    def start_episode(self, options: Mapping[str, Any]) -> str:
        if self._restart and self._used:
            self._server.close()
            self._server = McpServer(self._address, self._seconds)
            self.toolbox = Toolbox(chosen_tools(self._server.tools, self._names))
        self._used = True
        self._task = self._tasks[int(self.np_random.integers(len(self._tasks)))]
        self._made = []
        for call in self._task.setup:
            result = self._own_call(call)
            if result.error:
                raise McpServerError(f"the setup of a task failed: {result.text}")
        return self._task.question

    def _own_call(self, call: ToolCall) -> ToolResult:
        """Make a call of the task's own, with any of the server's tools."""
        try:
            box = Toolbox(chosen_tools(self._server.tools, [call.name]))
        except ValueError as error:
            raise McpServerError(f"a call of a task makes no sense: {error}") from error
        fault = box.fault(call)
        if fault is not None:
            raise McpServerError(f"a call of a task makes no sense: {fault}")
        return box.run(call)

    def run_call(self, call: ToolCall) -> ToolResult:
        result = self.toolbox.run(call)
        self._made.append(state_digest([call.name, dict(call.arguments), result.text]))
        return result

    def on_message(self, text: str) -> TurnResult | str:
        answer = last_tagged(text, "answer")
        if answer is None:
            return "error: there is neither a call of a tool nor an answer in answer tags, such as <answer>42</answer>."
        wanted = self._task.answer
        right = wanted is None or answers_agree(answer, wanted)
        done = right and all(
            self._own_call(call).text.strip() == text.strip() for call, text in self._task.checks
        )
        text = "The task is done." if done else "The task is not done."
        return TurnResult(text, float(done), terminated=True, success=done)

    def state_info(self) -> dict[str, Any]:
        return {
            "state": {"question": self._task.question},
            "anchor": state_digest([self._task.question, self._made]),
        }

    def describe_rules(self) -> str:
        return (
            f"{self._said} Once it is done, reply without a call and with the answer in answer tags, for example "
            "<answer>42</answer>, or <answer>done</answer> where nothing was asked."
        )


def _wanted_tasks(tasks: Sequence[McpTask], split: str | None) -> list[McpTask]:
    wanted = [task for task in tasks if split is None or split_of_text(task.question) == split]
    if not wanted:
        raise ValueError("there are no tasks" if split is None else f"none of the tasks is of split {split}")
    return wanted


def _parse_tasks(tasks: Sequence[Mapping[str, Any]] | None, tasks_file: str | None) -> list[McpTask]:
    if tasks is None:
        assert tasks_file is not None
        lines = Path(expand_user(tasks_file)).read_text(encoding="utf-8").splitlines()
        tasks = [json.loads(line) for line in lines if line.strip()]
    return [_parse_task(task) for task in tasks]


def _parse_task(value: Mapping[str, Any]) -> McpTask:
    if not isinstance(value, Mapping) or not isinstance(value.get("question"), str):
        raise ValueError("a task is an object with a question")
    if unknown := value.keys() - {"question", "answer", "setup", "checks"}:
        raise ValueError(f"a task has no {sorted(unknown)[0]!r}; it has question, answer, setup and checks")
    answer = value.get("answer")
    checks = tuple((_parse_call(check), str(check["equals"])) for check in value.get("checks", ()))
    if answer is None and not checks:
        raise ValueError("a task needs an answer or checks")
    setup = tuple(_parse_call(call) for call in value.get("setup", ()))
    return McpTask(value["question"], None if answer is None else str(answer), setup, checks)


def _parse_call(value: Mapping[str, Any]) -> ToolCall:
    return ToolCall(str(value["name"]), dict(value.get("arguments", {})))
