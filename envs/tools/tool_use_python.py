"""ToolUsePython-v0: ToolUse-v0 with a Python interpreter in a sandbox among the tools."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envs.code.boxes import operator_sandbox
from envs.tools.python_tool import python_tool
from envs.tools.tasks import KINDS
from envs.tools.tool import Tool
from envs.tools.tool_use import TOOL_GROUPS, ToolUseEnv
from sandbox.limits import Limits

PYTHON_GROUPS = (*TOOL_GROUPS, "python")


class ToolUsePythonEnv(ToolUseEnv):
    """ToolUse-v0 with the tool `python`, and tasks that need it.

    Every call is a program of its own, in the sandbox that the operator has chosen. Programs can tell the time, so it
    is not said to be deterministic.

    Args:
        python_seconds: How long one program may run.
        python_memory_mb: MiB that one program may use.
        **kwargs: Those of `ToolUseEnv`; `tools` may name `python`, and `kinds` those tasks that need it.

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
    kwargs_schema: ClassVar[dict[str, Any]] = {
        **ToolUseEnv.kwargs_schema,
        "properties": {
            **ToolUseEnv.kwargs_schema["properties"],
            "tools": {
                "type": "array",
                "items": {"enum": list(PYTHON_GROUPS)},
                "minItems": 1,
                "uniqueItems": True,
            },
            "kinds": {**ToolUseEnv.kwargs_schema["properties"]["kinds"], "items": {"enum": list(KINDS)}},
            "python_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
            "python_memory_mb": {"type": "integer", "minimum": 64, "maximum": 1024},
        },
    }

    def __init__(self, *, python_seconds: float = 5.0, python_memory_mb: int = 256, **kwargs: Any) -> None:
        self._limits = Limits(wall_seconds=python_seconds, memory_mb=python_memory_mb)
        super().__init__(**kwargs)

    def _group(self, name: str) -> Sequence[Tool]:
        return (python_tool(operator_sandbox, self._limits),) if name == "python" else super()._group(name)

    def _begin(self, options: Mapping[str, Any]) -> str:
        # An episode does not begin where there is no sandbox for it.
        operator_sandbox()
        return super()._begin(options)
