"""The environments that ship with the project. A list, filled by nobody's import."""

from envs.spec import EnvironmentSpec

_BUILTIN = (
    EnvironmentSpec("FrozenLake-v0", "envs.frozen_lake:FrozenLakeEnv", 100),
    EnvironmentSpec("Sokoban-v0", "envs.sokoban.environment:SokobanEnv", 120),
    EnvironmentSpec("Arithmetic-v0", "envs.verifiers.arithmetic:ArithmeticEnv", 1),
    EnvironmentSpec("Code-v0", "envs.code.debugging:CodeEnv", 4),
    EnvironmentSpec("PythonRepl-v0", "envs.code.python_repl:PythonReplEnv", 10),
    EnvironmentSpec("Shell-v0", "envs.code.shell:ShellEnv", 10),
    EnvironmentSpec("CodeTests-v0", "envs.verifiers.code_tests:CodeTestsEnv", 1),
)


def builtin_environments() -> dict[str, EnvironmentSpec]:
    """Return the built-in environments by id."""
    return {spec.id: spec for spec in _BUILTIN}
