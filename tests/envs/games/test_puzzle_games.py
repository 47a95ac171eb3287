"""TowerOfHanoi, Sudoku, Minesweeper and Maze against independent searches."""

from collections import deque
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.games.hanoi import TowerOfHanoiEnv, plan
from rollgym.envs.games.maze import MazeEnv
from rollgym.envs.games.minesweeper import Minefield, MinesweeperEnv, mine_chances
from rollgym.envs.games.sudoku import SudokuEnv, draw_puzzle, only_solution, solutions

# -- TowerOfHanoi ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disks", [1, 2, 3, 5])
def test_the_fewest_moves_are_those_of_a_search_from_every_start(disks):
    goal = (2,) * disks
    distances, frontier = {goal: 0}, deque([goal])
    while frontier:
        pegs = frontier.popleft()
        for disk in range(disks):
            for peg in set(range(3)) - {pegs[disk]}:
                if all(pegs[smaller] not in (pegs[disk], peg) for smaller in range(disk)):
                    reached = (*pegs[:disk], peg, *pegs[disk + 1 :])
                    if reached not in distances:
                        distances[reached] = distances[pegs] + 1
                        frontier.append(reached)
    assert len(distances) == 3**disks
    assert {pegs: plan(pegs)[0] for pegs in product(range(3), repeat=disks)} == distances


def test_the_classic_tower_takes_two_to_the_n_minus_one():
    environment = TowerOfHanoiEnv(disks=4, random_start=False)
    _, info = environment.reset(seed=0, options={"expert": True})
    assert info["optimal_steps"] == 15
    for step in range(15):
        *_, terminated, _, info = environment.step(info["expert_action"])
        assert terminated == (step == 14)


def test_rules_are_kept_and_explained():
    environment = TowerOfHanoiEnv()
    _, info = environment.reset(seed=0, options={"pegs": ["A", "A", "B"]})
    assert info["available_actions"] == ["A B", "A C", "B C"]
    assert "no disk on peg C" in environment.step("C A")[0]
    assert "Disk 3 cannot lie on the smaller disk 1" in environment.step("B A")[0]
    assert "another peg" in environment.step("A A")[0]
    assert environment.step("a, c")[4]["state"] == {"pegs": ["C", "A", "B"]}


def test_a_start_can_be_given():
    environment = TowerOfHanoiEnv()
    for pegs in (["C", "C"], ["D"], [], "AB", ["A"] * 11, ["A", ["B"]], [[]], ["AB"]):
        with pytest.raises(ValueError, match="pegs"):
            environment.reset(options={"pegs": pegs})


def test_difficult_starts():
    environment = TowerOfHanoiEnv(disks=4, min_moves=12)
    assert all(environment.reset(seed=seed)[1]["optimal_steps"] >= 12 for seed in range(20))


# -- Sudoku ------------------------------------------------------------------------------------------------------------


def brute_force(grid, size):
    """All solutions, cell by cell."""
    box = {4: 2, 9: 3}[size]
    if 0 not in grid:
        return [grid]
    cell = grid.index(0)
    row, column = divmod(cell, size)
    taken = set()
    for other, number in enumerate(grid):
        r, c = divmod(other, size)
        if r == row or c == column or (r // box, c // box) == (row // box, column // box):
            taken.add(number)
    free = set(range(1, size + 1)) - taken
    return [
        each
        for number in sorted(free)
        for each in brute_force((*grid[:cell], number, *grid[cell + 1 :]), size)
    ]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), clues=st.integers(5, 12))
def test_puzzles_of_four_have_one_solution_and_it_is_known(seed, clues):
    drawn = draw_puzzle(np.random.default_rng(seed), 4, clues)
    if drawn is None:
        return
    puzzle, solution = drawn
    assert sum(number > 0 for number in puzzle) == clues
    assert brute_force(puzzle, 4) == [solution]


def test_there_are_288_grids_of_four():
    assert len(set(solutions((0,) * 16, 4))) == len(brute_force((0,) * 16, 4)) == 288


@pytest.mark.parametrize("clues", [30, 40, 60])
def test_puzzles_of_nine_have_one_solution(clues):
    for seed in range(3):
        _, info = SudokuEnv(size=9, clues=clues).reset(seed=seed)
        puzzle = tuple(map(int, info["state"]["grid"].replace(".", "0")))
        assert sum(number > 0 for number in puzzle) == clues
        assert only_solution(puzzle, 9) is not None


def test_a_published_puzzle_is_solved():
    puzzle = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
    solution = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
    environment = SudokuEnv(size=9)
    _, info = environment.reset(seed=0, options={"puzzle": puzzle, "expert": True})
    assert info["optimal_steps"] == puzzle.count(".") == 51
    for _ in range(51):
        _, reward, terminated, _, info = environment.step(info["expert_action"])
    assert (info["state"]["grid"], reward, terminated) == (solution, 1.0, True)


def test_writing_over_and_conflicts():
    environment = SudokuEnv()
    environment.reset(seed=0, options={"puzzle": ".234341221434321"})
    text, reward, terminated, _, info = environment.step("1 1 2")
    assert (reward, terminated, info["action_is_valid"]) == (0.0, False, True)
    assert text.endswith("Twice in a row, column or box: row 1, column 1.")
    assert "is given and stays" in environment.step("1 2 2")[0]
    assert environment.step("(1, 1, 1)")[1:3] == (1.0, True)


@pytest.mark.parametrize("puzzle", ["." * 16, "1" * 16, "12", "1234341221434321", "5" + "." * 15, 3])
def test_a_given_puzzle_must_have_one_solution(puzzle):
    with pytest.raises(ValueError, match="puzzle must"):
        SudokuEnv().reset(options={"puzzle": puzzle})


# -- Minesweeper -------------------------------------------------------------------------------------------------------


def naive_chances(field: Minefield, opened: set[int]) -> dict[int, Fraction]:
    """Count every way to lay the mines that fits the open cells."""
    covered = sorted(set(range(field.rows * field.columns)) - opened)
    counts, fitting = dict.fromkeys(covered, 0), 0
    for mines in combinations(covered, len(field.mines)):
        laid = Minefield(field.rows, field.columns, frozenset(mines))
        if all(laid.number(cell) == field.number(cell) for cell in opened):
            fitting += 1
            for cell in mines:
                counts[cell] += 1
    return {cell: Fraction(count, fitting) for cell, count in counts.items()}


@settings(max_examples=40)
@given(data=st.data(), rows=st.integers(3, 4), columns=st.integers(3, 5), mines=st.integers(1, 4))
def test_chances_are_those_of_all_fields_that_fit(data, rows, columns, mines):
    cells = list(range(rows * columns))
    field = Minefield(rows, columns, frozenset(data.draw(st.permutations(cells))[:mines]))
    safe = [cell for cell in cells if cell not in field.mines]
    opened = set(data.draw(st.lists(st.sampled_from(safe), max_size=6)))
    covered = set(cells) - opened
    assert mine_chances(covered, field.clues(opened), mines) == naive_chances(field, opened)


def test_opening_spreads_over_zeros():
    field = Minefield(4, 4, frozenset({0}))
    assert field.opened_by(15) == set(range(1, 16))
    assert field.opened_by(1) == {1}
    assert [field.number(cell) for cell in (1, 2, 5)] == [1, 0, 1]


@pytest.mark.parametrize("cell", ["1 1", "4 3", "6 6"])
def test_the_first_cell_is_safe_and_opens_a_region(cell):
    environment = MinesweeperEnv(mines=12, solvable=False)
    for seed in range(20):
        environment.reset(seed=seed)
        _, _, terminated, _, info = environment.step(f"reveal {cell}")
        row, column = map(int, cell.split())
        assert info["state"]["rows"][row - 1][column - 1] == "0"
        assert info["success"] == terminated


def test_mines_end_the_game_and_flags_guard():
    environment = MinesweeperEnv(solvable=False)
    environment.reset(seed=1)
    environment.step("reveal 3 3")
    mine = min(environment._field.mines)
    place = f"{mine // 6 + 1} {mine % 6 + 1}"
    assert "F" in "".join(environment.step(f"flag {place}")[4]["state"]["rows"])
    text, _, terminated, _, info = environment.step(f"reveal {place}")
    assert (terminated, info["action_is_valid"]) == (False, False)
    assert "has a flag" in text
    environment.step(f"flag {place}")
    _, reward, terminated, _, info = environment.step(f"Reveal {place}")
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert "*" in "".join(info["state"]["rows"])


@pytest.mark.parametrize(("rows", "columns", "mines"), [(5, 5, 4), (8, 8, 10)])
def test_solvable_fields_are_cleared_without_a_guess(rows, columns, mines):
    environment = MinesweeperEnv(rows=rows, columns=columns, mines=mines)
    for seed in range(6):
        environment.reset(seed=seed)
        environment.step("reveal 2 3")
        field, cells = environment._field, set(range(rows * columns))
        while True:
            chances = mine_chances(cells - environment._open, field.clues(environment._open), mines)
            certain = next((cell for cell, chance in chances.items() if chance == 0), None)
            if certain is None:
                break
            *_, _info = environment.step(f"reveal {certain // columns + 1} {certain % columns + 1}")
        assert len(environment._open) == len(cells) - mines


# -- Maze --------------------------------------------------------------------------------------------------------------


def walk_length(rows, position, goal):
    """Shortest way on the drawing itself, two places a move."""
    start = (2 * position[0] + 1, 2 * position[1] + 1)
    end = (2 * goal[0] + 1, 2 * goal[1] + 1)
    seen, frontier = {start: 0}, deque([start])
    while frontier:
        row, column = frontier.popleft()
        for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            if rows[row + down][column + right] == " " and (row + 2 * down, column + 2 * right) not in seen:
                seen[row + 2 * down, column + 2 * right] = seen[row, column] + 1
                frontier.append((row + 2 * down, column + 2 * right))
    return seen[end], len(seen)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 8), loops=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_shortest_way_is_known_and_every_cell_can_be_reached(seed, size, loops):
    environment = MazeEnv(size=size, loops=loops, min_path=1)
    _, info = environment.reset(seed=seed)
    state = info["state"]
    assert walk_length(state["rows"], state["position"], state["goal"]) == (
        info["optimal_steps"],
        size * size,
    )
    # A maze without loops has one passage fewer than cells; with all walls broken no wall is left between cells.
    passages = {0.0: size * size - 1, 1.0: 2 * size * (size - 1)}
    if loops in passages:
        assert len(environment._maze.passages) == passages[loops]


def test_lengths_are_kept_and_contradictions_told():
    environment = MazeEnv(size=6, min_path=8, max_path=10)
    assert all(8 <= environment.reset(seed=seed)[1]["optimal_steps"] <= 10 for seed in range(10))
    with pytest.raises(ValueError, match="loosen"):
        MazeEnv(size=4, loops=1.0, min_path=15).reset(seed=0)


def test_a_wall_is_told_and_coordinates_agree_with_the_map():
    environment = MazeEnv(show="both", size=4)
    text, info = environment.reset(seed=3)
    drawing, told = text.split("\n\n")
    row, column = info["state"]["position"]
    assert drawing.split("\n")[2 * row + 1][2 * column + 1] == "P"
    assert told.startswith(f"You: row {row}, column {column}\n")
    (blocked, *_) = {"Up", "Down", "Left", "Right"} - set(info["available_actions"])
    answer, *_, after = environment.step(blocked)
    assert "There is a wall" in answer
    assert after["state"] == info["state"]


def test_the_picture_has_a_square_for_each_place():
    environment = MazeEnv(render_mode="rgb_array", size=4)
    environment.reset(seed=0)
    assert environment.render().shape == (9 * 12, 9 * 12, 3)
