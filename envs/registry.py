"""The environments that ship with the project. A list, filled by nobody's import."""

from envs.spec import EnvironmentSpec

_BUILTIN = (
    EnvironmentSpec("FrozenLake-v0", "envs.frozen_lake:FrozenLakeEnv", 100),
    EnvironmentSpec("Sokoban-v0", "envs.sokoban.environment:SokobanEnv", 120),
    EnvironmentSpec("Countdown-v0", "envs.games.countdown:CountdownEnv", 5),
    EnvironmentSpec("Bandit-v0", "envs.games.bandit:BanditEnv", 40),
    EnvironmentSpec("GuessNumber-v0", "envs.games.guess_number:GuessNumberEnv", 10),
    EnvironmentSpec("TowerOfHanoi-v0", "envs.games.hanoi:TowerOfHanoiEnv", 50),
    EnvironmentSpec("Game2048-v0", "envs.games.game_2048:Game2048Env", 2_000),
    EnvironmentSpec("Sudoku-v0", "envs.games.sudoku:SudokuEnv", 100),
    EnvironmentSpec("Mastermind-v0", "envs.games.mastermind:MastermindEnv", 12),
    EnvironmentSpec("Minesweeper-v0", "envs.games.minesweeper:MinesweeperEnv", 100),
    EnvironmentSpec("Blackjack-v0", "envs.games.blackjack:BlackjackEnv", 20),
    EnvironmentSpec("Maze-v0", "envs.games.maze:MazeEnv", 100),
    EnvironmentSpec("Arithmetic-v0", "envs.verifiers.arithmetic:ArithmeticEnv", 1),
)


def builtin_environments() -> dict[str, EnvironmentSpec]:
    """Return the built-in environments by id."""
    return {spec.id: spec for spec in _BUILTIN}
