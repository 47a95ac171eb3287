"""ToolUsePython-v0: ToolUse-v0 with a Python interpreter in a sandbox among the tools."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Unpack

from pydantic import Field

from rollgym.envs.code.sandboxes import operator_sandbox
from rollgym.envs.core.kwargs import SomeOf
from rollgym.envs.tools.tasks import KINDS
from rollgym.envs.tools.tool import Tool, ToolError, tool_parameters
from rollgym.envs.tools.tool_use import TOOL_GROUPS, ToolUseEnv, ToolUseKwargs
from rollgym.sandbox.core.base import Outcome, Program, RunResult, Sandbox
from rollgym.sandbox.core.limits import Limits

PYTHON_GROUPS = (*TOOL_GROUPS, "python")


class ToolUsePythonEnv(ToolUseEnv):
    """ToolUse-v0 with the tool `python`, and tasks that need it.

    Every call is a program of its own, in the sandbox that the operator has chosen. Programs can tell the time, so it
    is not said to be deterministic.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = ToolUseEnv.metadata | {
        "description": "Answer generated questions with Python in a sandbox, a calculator, search, a store and dates.",
        "inline": False,
        "deterministic": False,
        "forkable": False,
        "needs": "a sandbox",
        "baselines": {"random": 0, "constant action": 0, "blind": 0, "expert": 1},
    }
    groups: ClassVar[tuple[str, ...]] = PYTHON_GROUPS

    def __init__(
        self,
        *,
        tools: Annotated[
            Sequence[str] | None, SomeOf(*PYTHON_GROUPS), Field(description="Groups of tools that are there.")
        ] = None,
        kinds: Annotated[
            Sequence[str] | None,
            SomeOf(*KINDS),
            Field(description="Kinds of tasks that are drawn; null for all that the tools are enough for."),
        ] = None,
        python_seconds: Annotated[
            float, Field(gt=0, le=10, description="How long one program may run.")
        ] = 5.0,
        python_memory_mb: Annotated[
            int, Field(ge=64, le=1024, description="MiB that one program may use.")
        ] = 256,
        **common: Unpack[ToolUseKwargs],
    ) -> None:
        self._limits = Limits(wall_seconds=python_seconds, memory_mb=python_memory_mb)
        super().__init__(tools=tools, kinds=kinds, **common)

    def _group(self, name: str) -> Sequence[Tool]:
        return (python_tool(operator_sandbox, self._limits),) if name == "python" else super()._group(name)

    def start_episode(self, options: Mapping[str, Any]) -> str:
        # An episode fails at its start if it has no sandbox.
        operator_sandbox()
        return super().start_episode(options)


_MOST_SHOWN = 4_000
_LONGEST = 20_000


class SandboxFailedError(RuntimeError):
    """The sandbox failed, which says nothing of the program; the episode is not to be scored."""


def python_tool(sandbox: Callable[[], Sandbox], limits: Limits) -> Tool:
    """Return the tool.

    Args:
        sandbox: Gives that in which programs run, once there is one to be run.
        limits: Limits of one program.
    """

    def run(code: str) -> str:
        return _text(sandbox().run(Program("python", code), limits=limits), limits)

    return Tool(
        "python",
        "Run a Python program and return what it prints. Each program starts anew; it has no network.",
        tool_parameters(["code"], code={"type": "string", "maxLength": _LONGEST}),
        run,
    )


def _text(result: RunResult, limits: Limits) -> str:
    if result.outcome is Outcome.SANDBOX_ERROR:
        raise SandboxFailedError(f"the sandbox failed: {result.detail}")
    printed = _shortened(result.stdout.decode(errors="replace"))
    if result.outcome is Outcome.OK:
        return printed or "nothing was printed; print what you want to know"
    said = _shortened(result.stderr.decode(errors="replace").strip()) or f"exit code {result.exit_code}"
    if result.outcome is Outcome.TIME_LIMIT:
        said = f"the program took more than {limits.wall_seconds:g} seconds"
    elif result.outcome is not Outcome.NON_ZERO_EXIT:
        said = result.detail or str(result.outcome)
    raise ToolError("\n".join(part for part in (said, printed) if part))


def _shortened(text: str) -> str:
    """Keep both ends of a long text: an error is in its last line."""
    if len(text) <= _MOST_SHOWN:
        return text.rstrip("\n")
    half = _MOST_SHOWN // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}".rstrip("\n")
