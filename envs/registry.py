"""The environments that ship with the project. A plain table, which no import extends."""

from rollgym.extensions import Extension

_BUILTIN = {
    "FrozenLake-v0": "rollgym.envs.games.frozen_lake:FrozenLakeEnv",
    "Sokoban-v0": "rollgym.envs.games.sokoban.environment:SokobanEnv",
    "Countdown-v0": "rollgym.envs.games.countdown:CountdownEnv",
    "Bandit-v0": "rollgym.envs.games.bandit:BanditEnv",
    "GuessNumber-v0": "rollgym.envs.games.guess_number:GuessNumberEnv",
    "TowerOfHanoi-v0": "rollgym.envs.games.hanoi:TowerOfHanoiEnv",
    "Game2048-v0": "rollgym.envs.games.game_2048:Game2048Env",
    "Sudoku-v0": "rollgym.envs.games.sudoku:SudokuEnv",
    "Mastermind-v0": "rollgym.envs.games.mastermind:MastermindEnv",
    "Minesweeper-v0": "rollgym.envs.games.minesweeper:MinesweeperEnv",
    "Blackjack-v0": "rollgym.envs.games.blackjack:BlackjackEnv",
    "Maze-v0": "rollgym.envs.games.maze:MazeEnv",
    "WebShop-v0": "rollgym.envs.webshop.environment:WebShopEnv",
    "ToolUse-v0": "rollgym.envs.tools.tool_use:ToolUseEnv",
    "ToolUsePython-v0": "rollgym.envs.tools.tool_use_python:ToolUsePythonEnv",
    "Retail-v0": "rollgym.envs.tools.retail.environment:RetailEnv",
    "Code-v0": "rollgym.envs.code.debugging:CodeEnv",
    "PythonRepl-v0": "rollgym.envs.code.python_repl:PythonReplEnv",
    "Shell-v0": "rollgym.envs.code.shell:ShellEnv",
    "Arithmetic-v0": "rollgym.envs.verifiers.arithmetic:ArithmeticEnv",
    "Math-v0": "rollgym.envs.verifiers.mathematics:MathEnv",
    "MultipleChoice-v0": "rollgym.envs.verifiers.multiple_choice:MultipleChoiceEnv",
    "QA-v0": "rollgym.envs.verifiers.question_answering:QuestionAnsweringEnv",
    "FunctionCalls-v0": "rollgym.envs.verifiers.function_calls:FunctionCallsEnv",
    "CodeTests-v0": "rollgym.envs.verifiers.code_tests:CodeTestsEnv",
    "ReasoningGym-v0": "rollgym.envs.verifiers.reasoning_gym:ReasoningGymEnv",
    "InstructionFollowing-v0": "rollgym.envs.verifiers.instructions.environment:InstructionFollowingEnv",
    "Format-v0": "rollgym.envs.verifiers.formats.environment:FormatEnv",
    "Judge-v0": "rollgym.envs.verifiers.judge:JudgeEnv",
    "Composite-v0": "rollgym.envs.verifiers.composite:CompositeEnv",
}


def builtin_environments() -> dict[str, Extension]:
    """Return the built-in environments by id; nothing of them is imported."""
    return {env_id: Extension(path, ("rollgym",), ambiguous=False) for env_id, path in _BUILTIN.items()}
