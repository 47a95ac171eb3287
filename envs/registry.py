"""The environments that ship with the project. A list, filled by nobody's import."""

from envs.spec import EnvironmentSpec

_BUILTIN = (
    EnvironmentSpec("FrozenLake-v0", "envs.frozen_lake:FrozenLakeEnv", 100),
    EnvironmentSpec("Sokoban-v0", "envs.sokoban.environment:SokobanEnv", 120),
    EnvironmentSpec("ToolUse-v0", "envs.tools.tool_use:ToolUseEnv", 16),
    EnvironmentSpec("ToolUsePython-v0", "envs.tools.tool_use_python:ToolUsePythonEnv", 16),
    EnvironmentSpec("Retail-v0", "envs.tools.retail.environment:RetailEnv", 40),
    EnvironmentSpec("FunctionCalls-v0", "envs.verifiers.function_calls:FunctionCallsEnv", 1),
    EnvironmentSpec("Arithmetic-v0", "envs.verifiers.arithmetic:ArithmeticEnv", 1),
)


def builtin_environments() -> dict[str, EnvironmentSpec]:
    """Return the built-in environments by id."""
    return {spec.id: spec for spec in _BUILTIN}
