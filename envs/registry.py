"""The environments that ship with the project. A plain list, which no import extends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """One environment that ships with the project.

    Attributes:
        id: Name without the Gymnasium namespace, such as `FrozenLake-v0`.
        entry_point: `module:Class`.
        max_episode_steps: Step limit of the defaults; None without a limit.
    """

    id: str
    entry_point: str
    max_episode_steps: int | None = None


_BUILTIN = (
    EnvironmentSpec("FrozenLake-v0", "rollgym.envs.games.frozen_lake:FrozenLakeEnv", 100),
    EnvironmentSpec("Sokoban-v0", "rollgym.envs.games.sokoban.environment:SokobanEnv", 120),
    EnvironmentSpec("Countdown-v0", "rollgym.envs.games.countdown:CountdownEnv", 5),
    EnvironmentSpec("Bandit-v0", "rollgym.envs.games.bandit:BanditEnv", 40),
    EnvironmentSpec("GuessNumber-v0", "rollgym.envs.games.guess_number:GuessNumberEnv", 10),
    EnvironmentSpec("TowerOfHanoi-v0", "rollgym.envs.games.hanoi:TowerOfHanoiEnv", 50),
    EnvironmentSpec("Game2048-v0", "rollgym.envs.games.game_2048:Game2048Env", 2_000),
    EnvironmentSpec("Sudoku-v0", "rollgym.envs.games.sudoku:SudokuEnv", 100),
    EnvironmentSpec("Mastermind-v0", "rollgym.envs.games.mastermind:MastermindEnv", 12),
    EnvironmentSpec("Minesweeper-v0", "rollgym.envs.games.minesweeper:MinesweeperEnv", 100),
    EnvironmentSpec("Blackjack-v0", "rollgym.envs.games.blackjack:BlackjackEnv", 20),
    EnvironmentSpec("Maze-v0", "rollgym.envs.games.maze:MazeEnv", 100),
    EnvironmentSpec("WebShop-v0", "rollgym.envs.webshop.environment:WebShopEnv", 15),
    EnvironmentSpec("ToolUse-v0", "rollgym.envs.tools.tool_use:ToolUseEnv", 16),
    EnvironmentSpec("ToolUsePython-v0", "rollgym.envs.tools.tool_use_python:ToolUsePythonEnv", 16),
    EnvironmentSpec("Retail-v0", "rollgym.envs.tools.retail.environment:RetailEnv", 40),
    EnvironmentSpec("Code-v0", "rollgym.envs.code.debugging:CodeEnv", 4),
    EnvironmentSpec("PythonRepl-v0", "rollgym.envs.code.python_repl:PythonReplEnv", 10),
    EnvironmentSpec("Shell-v0", "rollgym.envs.code.shell:ShellEnv", 10),
    EnvironmentSpec("Arithmetic-v0", "rollgym.envs.verifiers.arithmetic:ArithmeticEnv", 1),
    EnvironmentSpec("Math-v0", "rollgym.envs.verifiers.mathematics:MathEnv", 1),
    EnvironmentSpec("MultipleChoice-v0", "rollgym.envs.verifiers.multiple_choice:MultipleChoiceEnv", 1),
    EnvironmentSpec("QA-v0", "rollgym.envs.verifiers.question_answering:QuestionAnsweringEnv", 1),
    EnvironmentSpec("FunctionCalls-v0", "rollgym.envs.verifiers.function_calls:FunctionCallsEnv", 1),
    EnvironmentSpec("CodeTests-v0", "rollgym.envs.verifiers.code_tests:CodeTestsEnv", 1),
    EnvironmentSpec("ReasoningGym-v0", "rollgym.envs.verifiers.reasoning_gym:ReasoningGymEnv", 1),
    EnvironmentSpec(
        "InstructionFollowing-v0",
        "rollgym.envs.verifiers.instructions.environment:InstructionFollowingEnv",
        1,
    ),
    EnvironmentSpec("Format-v0", "rollgym.envs.verifiers.formats.environment:FormatEnv", 1),
    EnvironmentSpec("Judge-v0", "rollgym.envs.verifiers.judge:JudgeEnv", 1),
    EnvironmentSpec("Composite-v0", "rollgym.envs.verifiers.composite:CompositeEnv", 1),
)


def builtin_environments() -> dict[str, EnvironmentSpec]:
    """Return the built-in environments by id."""
    return {spec.id: spec for spec in _BUILTIN}
