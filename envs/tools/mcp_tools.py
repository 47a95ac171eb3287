"""McpTools: tasks that are done with the tools of an MCP server, over its standard streams or over HTTP."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from pydantic import Field

from rollgym.clients.process.background import BackgroundLoop
from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.marks import last_tagged
from rollgym.envs.core.json_schemas import SchemaValidator
from rollgym.envs.core.kwargs import OPERATOR
from rollgym.envs.core.schema_parts import SchemaError
from rollgym.envs.core.splits import TaskSplit, checked_split, split_of_text
from rollgym.envs.tools.base import CallsPerTurn, StepLimit, ToolEnv, ToolKwargs, TurnResult, state_digest
from rollgym.envs.tools.tasks import answers_agree
from rollgym.envs.tools.tool import Tool, Toolbox, ToolError, ToolResult
from rollgym.extras import install_line
from rollgym.user_paths import expand_user

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult


_CONNECTION_CLOSED = -32000
_MOST_PAGES = 100
_LONGEST_NAME = 100
_FAREWELL_SECONDS = 10.0


class McpServerError(RuntimeError):
    """The server cannot be reached, or has ended; that says nothing of the policy, so the episode is not scored."""


@dataclass(frozen=True, slots=True)
class McpAddress:
    """The address of an MCP server: a command to start, or a URL. The operator sets it, and never a client.

    Attributes:
        command: Program that speaks MCP over its standard streams; empty if `url` is set.
        arguments: Words of its command line.
        variables: Added to its environment, which otherwise holds only the likes of PATH and HOME.
        directory: Its working directory; the present one if None.
        url: URL of a server that speaks streamable HTTP; empty if `command` is set.
        headers: Sent with every request, such as `Authorization`.
    """

    command: str = ""
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def parse_address(value: Mapping[str, Any]) -> McpAddress:
    """Read an address from a configuration: `command`, `args`, `env`, `cwd`, or `url` and `headers`.

    Raises:
        ValueError: If it is not one.
    """
    if not isinstance(value, Mapping):
        raise ValueError("server must be an object with a command or a url")
    over_streams, over_http = {"command", "args", "env", "cwd"}, {"url", "headers"}
    if unknown := set(value) - over_streams - over_http:
        raise ValueError(
            f"server has no {sorted(unknown)[0]!r}; it has command, args, env, cwd, or url, headers"
        )
    if ("command" in value) == ("url" in value):
        raise ValueError("server needs either a command or a url")
    if set(value) - (over_streams if "command" in value else over_http):
        raise ValueError("args, env and cwd belong to a command, headers to a url")
    address = McpAddress(
        command=value.get("command", ""),
        arguments=tuple(value.get("args", ())),
        variables=dict(value.get("env", {})),
        directory=value.get("cwd"),
        url=value.get("url", ""),
        headers=dict(value.get("headers", {})),
    )
    texts = (
        address.command,
        address.url,
        *address.arguments,
        *address.variables.values(),
        *address.headers.values(),
    )
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("command, args, env, url and headers of server are texts")
    if address.url and not address.url.startswith(("http://", "https://")):
        raise ValueError(f"the url of a server begins with http:// or https://, not {address.url[:40]!r}")
    return address


class McpServer:
    """An open connection, for plain code. It belongs to one environment.

    Args:
        address: The server's address.
        timeout_seconds: Time limit of its start, and of each call.

    Raises:
        McpServerError: If it cannot be reached, or the extra `mcp` is not installed.
    """

    def __init__(self, address: McpAddress, timeout_seconds: float) -> None:
        try:
            import mcp  # noqa: F401 - an extra: users without MCP servers need none of it
        except ImportError as error:
            raise McpServerError(f"MCP servers need the extra mcp: {install_line('mcp')}") from error
        self._address = address
        self._timeout = timeout_seconds
        self._client: Client | None = None
        self._life: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._loop = BackgroundLoop()
        opened = False
        try:
            self.tools = self._loop.run(self._open())
            opened = True
        finally:
            if not opened:
                self.close()

    def close(self) -> None:
        """End the connection, and stop the server if it was started here; closing again does nothing."""
        if self._life is not None:
            self._loop.run(self._end())
        self._loop.close()

    # -- on the loop's thread --------------------------------------------------------------------------------------

    async def _open(self) -> tuple[Tool, ...]:
        ready: asyncio.Future[tuple[Tool, ...]] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        both: set[asyncio.Future[Any]] = {ready, self._life}
        await asyncio.wait(both, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return ready.result()
        if not self._life.done():
            raise McpServerError(f"the MCP server did not answer in {self._timeout:g} seconds")
        raise self._lost()

    async def _live(self, ready: "asyncio.Future[tuple[Tool, ...]]") -> None:
        """Hold the connection from its opening to its end: the library wants both in one task."""
        async with AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(await self._connecting(stack))
            ready.set_result(await self._listed(self._client))
            await self._closing.wait()

    async def _connecting(self, stack: AsyncExitStack) -> "Client":
        from mcp import Client, StdioServerParameters

        address = self._address
        if address.command:
            return Client(
                StdioServerParameters(
                    command=address.command,
                    args=list(address.arguments),
                    env=dict(address.variables),
                    cwd=address.directory,
                )
            )
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # A call that takes too long is given up by itself, and not with the whole connection.
        timeout = httpx2.Timeout(self._timeout, read=None)
        http = httpx2.AsyncClient(headers=dict(address.headers), timeout=timeout)
        await stack.enter_async_context(http)
        return Client(streamable_http_client(address.url, http_client=http))

    async def _listed(self, client: "Client") -> tuple[Tool, ...]:
        found: list[Tool] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += [self._tool(each.name, each.description or "", each.input_schema) for each in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tuple(found)
        raise McpServerError(f"the MCP server lists tools on over {_MOST_PAGES} pages")

    def _tool(self, name: str, description: str, schema: Mapping[str, Any]) -> Tool:
        return Tool(
            name, description, schema, lambda **arguments: self._loop.run(self._call(name, arguments))
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError

        assert self._client is not None
        assert self._life is not None
        call = asyncio.create_task(self._client.call_tool(name, arguments))
        await asyncio.wait({call, self._life}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            if self._life.done():
                raise self._lost()
            raise ToolError(f"{name} took more than {self._timeout:g} seconds")
        error = call.exception()
        if isinstance(error, MCPError) and error.code != _CONNECTION_CLOSED:
            raise ToolError(error.message)
        if error is not None:
            raise McpServerError(f"the MCP server has gone: {_reason(error)}") from error
        result = call.result()
        if result.is_error:
            raise ToolError(_text(result))
        return _text(result)

    async def _end(self) -> None:
        self._closing.set()
        assert self._life is not None
        if self._client is None:
            self._life.cancel()
        await asyncio.wait({self._life}, timeout=_FAREWELL_SECONDS)
        self._life = None

    def _lost(self) -> McpServerError:
        assert self._life is not None
        error = None if self._life.cancelled() else self._life.exception()
        if error is None:
            return McpServerError("the MCP server has gone")
        lost = McpServerError(f"the MCP server cannot be used: {_reason(error)}")
        lost.__cause__ = error
        return lost


def _reason(error: BaseException) -> str:
    """Return what went wrong at the bottom of groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _text(result: "CallToolResult") -> str:
    """Return a result as text; other content is named by its kind."""
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    return "\n".join(parts)


def _chosen_tools(tools: Sequence[Tool], names: Sequence[str] | None) -> list[Tool]:
    """Return the tools of these names; all of them if None.

    Only these have to have schemas that can be used: a server may have others.

    Raises:
        ValueError: If a tool is unknown.
        McpServerError: If the parameters of one of them are not a usable JSON Schema.
    """
    by_name = {tool.name: tool for tool in tools}
    for name in names or ():
        if name not in by_name:
            raise ValueError(f"the MCP server has no tool {name!r}; it has {', '.join(by_name)}")
    chosen = list(tools) if names is None else [by_name[name] for name in names]
    for tool in chosen:
        _check(tool)
    return chosen


def _check(tool: Tool) -> None:
    try:
        SchemaValidator(tool.parameters)
    except SchemaError as error:
        raise McpServerError(
            f"the parameters of its tool {tool.name[:_LONGEST_NAME]} are no JSON Schema that can be used: {error}; "
            "it can be left out of `tools`"
        ) from error


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
                Toolbox(_chosen_tools(self._server.tools, tools)),
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
            self.toolbox = Toolbox(_chosen_tools(self._server.tools, self._names))
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
            box = Toolbox(_chosen_tools(self._server.tools, [call.name]))
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
