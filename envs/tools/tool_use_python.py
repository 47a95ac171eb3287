"""ToolUsePython-v0: ToolUse-v0 with a Python interpreter in a sandbox among the tools."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Unpack

from pydantic import Field

from envs.code.boxes import operator_sandbox
from envs.kwargs import SomeOf
from envs.tools.python_tool import python_tool
from envs.tools.tasks import KINDS
from envs.tools.tool import Tool
from envs.tools.tool_use import TOOL_GROUPS, ToolUseEnv, ToolUseKwargs
from sandbox.core.limits import Limits

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

    def _begin(self, options: Mapping[str, Any]) -> str:
        # An episode does not begin where there is no sandbox for it.
        operator_sandbox()
        return super()._begin(options)
