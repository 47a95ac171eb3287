"""Optimal solutions: fewest moves, by A* over boxes and player."""

import heapq
from collections import deque
from itertools import count

from rollgym.envs.games.sokoban.board import Level, Room

State = tuple[frozenset[int], int]
"""Boxes and player."""


class SearchLimitError(RuntimeError):
    """The search gave up before it knew."""


def push_distances(room: Room) -> dict[int, int]:
    """Return the fewest pushes that bring a lone box from each cell to a target; dead cells are missing.

    A cell is dead if no box can ever leave it for a target: pulling backwards from the targets never gets there.
    """
    distances = dict.fromkeys(room.targets, 0)
    frontier = deque(room.targets)
    while frontier:
        cell = frontier.popleft()
        for step in room.steps:
            pulled, player = cell + step, cell + 2 * step
            free = pulled not in room.walls and player not in room.walls and _inside(room, player)
            if free and pulled not in distances:
                distances[pulled] = distances[cell] + 1
                frontier.append(pulled)
    return distances


def solve(level: Level, max_states: int = 500_000) -> list[int] | None:
    """Return a shortest sequence of actions that solves `level`, or None if there is none.

    The lower bound is the sum of each box's pushes to its nearest target, which never exceeds the moves that are left.

    Raises:
        SearchLimitError: If `max_states` states were expanded without an answer.
    """
    room = level.room
    distances = push_distances(room)
    if any(box not in distances for box in level.boxes):
        return None
    start: State = (level.boxes, level.player)
    order = count()
    bound = sum(distances[box] for box in level.boxes)
    queue: list[tuple[int, int, int, State]] = [(bound, 0, next(order), start)]
    moves: dict[State, int] = {start: 0}
    came_from: dict[State, tuple[State, int]] = {}
    expanded = 0
    while queue:
        _, negative, _, state = heapq.heappop(queue)
        spent = -negative
        if spent > moves[state]:
            continue
        boxes, player = state
        if boxes == room.targets:
            return _path(came_from, state)
        expanded += 1
        if expanded > max_states:
            raise SearchLimitError(f"no solution within {max_states} states")
        for action, step in enumerate(room.steps):
            ahead = player + step
            if ahead in room.walls:
                continue
            next_boxes = boxes
            if ahead in boxes:
                behind = ahead + step
                if behind not in distances or behind in boxes:
                    continue
                next_boxes = (boxes - {ahead}) | {behind}
            reached: State = (next_boxes, ahead)
            if spent + 1 < moves.get(reached, 1 << 60):
                moves[reached] = spent + 1
                came_from[reached] = (state, action)
                bound = sum(distances[box] for box in next_boxes)
                heapq.heappush(queue, (spent + 1 + bound, -(spent + 1), next(order), reached))
    return None


def _path(came_from: dict[State, tuple[State, int]], state: State) -> list[int]:
    actions = []
    while state in came_from:
        state, action = came_from[state]
        actions.append(action)
    return actions[::-1]


def _inside(room: Room, cell: int) -> bool:
    return 0 <= cell < room.height * room.width
