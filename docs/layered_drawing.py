"""Draws a graph in layers as SVG, with arrows from top to bottom: what the site shows for a Mermaid flowchart.

The layout is Sugiyama's (1981), made small: layers by longest path, points where long arrows pass a layer, and the
order within a layer by the mean place of neighbours. Pure functions; a reader needs no script to see the result.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape

_CHARACTER = 7.4
"""Width of a character of a label, in pixels."""
_PADDING = 24.0
_HEIGHT = 30.0
_GAP = 22.0
_LAYER = 62.0
_PASSING = 10.0
"""Width that an arrow takes where it passes a layer."""
_SWEEPS = 12
_ARROW = re.compile(r"(\w+)(?: --> (\w+))?")

Arrows = Mapping[str, Sequence[str]]
Node = str | tuple[str, str, int]
"""A box by its label, or the place where an arrow (from, to) passes a layer."""


def read_flowchart(text: str) -> dict[str, list[str]]:
    """Read the arrows of a Mermaid flowchart that has lines `a --> b` and `a` only.

    Raises:
        ValueError: It has anything else.
    """
    first, *lines = [line.strip() for line in text.strip().splitlines()]
    if first != "flowchart TD":
        raise ValueError(f"only 'flowchart TD' is drawn, not {first!r}")
    arrows: dict[str, list[str]] = {}
    for line in lines:
        found = _ARROW.fullmatch(line)
        if found is None:
            raise ValueError(f"only lines 'a --> b' and 'a' are drawn, not {line!r}")
        arrows.setdefault(found[1], [])
        if found[2]:
            arrows[found[1]].append(found[2])
            arrows.setdefault(found[2], [])
    return arrows


def svg(arrows: Arrows, title: str) -> str:
    """Draw boxes and arrows.

    Args:
        arrows: The boxes that arrows lead to, by the box that they begin at. Every box is a key.
        title: What the drawing shows, for readers who do not see it.

    Raises:
        ValueError: Arrows go in a circle.
    """
    layers = _ordered(_layers(arrows), arrows)
    place = _places(layers)
    width = max(x + _width(node) / 2 for node, (x, _) in place.items()) + 2
    height = (len(layers) - 1) * _LAYER + _HEIGHT + 4
    level = {node: index for index, layer in enumerate(layers) for node in layer}
    paths = [
        f'<path d="{_path([place[node] for node in _way(source, target, level)])}"/>'
        for source, targets in arrows.items()
        for target in targets
    ]
    boxes = [_box(str(node), *place[node]) for layer in layers for node in layer if isinstance(node, str)]
    return (
        f'<svg class="layers" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img">'
        f"<title>{escape(title)}</title>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>'
        f'<g class="arrows" marker-end="url(#tip)">{"".join(paths)}</g>{"".join(boxes)}</svg>'
    )


def _layers(arrows: Arrows) -> list[list[Node]]:
    """Put every box below all that lead to it, and a point of passage into each layer between."""
    level = _levels(arrows)
    layers: list[list[Node]] = [[] for _ in range(max(level.values()) + 1)]
    for box, index in level.items():
        layers[index].append(box)
    for source, targets in arrows.items():
        for target in targets:
            for index in range(level[source] + 1, level[target]):
                layers[index].append((source, target, index))
    return layers


def _levels(arrows: Arrows) -> dict[str, int]:
    waiting = {box: sum(box in targets for targets in arrows.values()) for box in arrows}
    level = dict.fromkeys(arrows, 0)
    free = [box for box, count in waiting.items() if count == 0]
    done = 0
    while free:
        box = free.pop()
        done += 1
        for target in arrows[box]:
            level[target] = max(level[target], level[box] + 1)
            waiting[target] -= 1
            if waiting[target] == 0:
                free.append(target)
    if done < len(arrows):
        raise ValueError(f"arrows go in a circle among {', '.join(box for box in arrows if waiting[box])}")
    return level


def _ordered(layers: list[list[Node]], arrows: Arrows) -> list[list[Node]]:
    """Order each layer by the mean place of the neighbours above, then of those below, several times."""
    level = {node: index for index, layer in enumerate(layers) for node in layer}
    above: dict[Node, list[Node]] = {node: [] for node in level}
    below: dict[Node, list[Node]] = {node: [] for node in level}
    for source, targets in arrows.items():
        for target in targets:
            way = _way(source, target, level)
            for upper, lower in itertools.pairwise(way):
                below[upper].append(lower)
                above[lower].append(upper)
    for sweep in range(_SWEEPS):
        neighbours = above if sweep % 2 == 0 else below
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            at = {node: (index + 0.5) / len(each) for each in layers for index, node in enumerate(each)}
            layer.sort(key=lambda node: _mean([at[each] for each in neighbours[node]], at[node]))
    return layers


def _way(source: str, target: str, level: Mapping[Node, int]) -> list[Node]:
    between = range(level[source] + 1, level[target])
    return [source, *((source, target, index) for index in between), target]


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _width(node: Node) -> float:
    return len(node) * _CHARACTER + _PADDING if isinstance(node, str) else _PASSING


def _places(layers: Sequence[Sequence[Node]]) -> dict[Node, tuple[float, float]]:
    """The middle of every box, each layer in the middle of the drawing."""
    widths = [sum(map(_width, layer)) + _GAP * (len(layer) - 1) for layer in layers]
    place: dict[Node, tuple[float, float]] = {}
    for index, (layer, width) in enumerate(zip(layers, widths, strict=True)):
        x = (max(widths) - width) / 2 + 2
        for node in layer:
            place[node] = (x + _width(node) / 2, index * _LAYER + _HEIGHT / 2 + 2)
            x += _width(node) + _GAP
    return place


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A smooth line from below the first point to above the last."""
    (x, y), *others = points
    line = f"M{x:.0f} {y + _HEIGHT / 2:.0f}"
    y += _HEIGHT / 2
    for index, (next_x, next_y) in enumerate(others):
        end = next_y - _HEIGHT / 2 - 2 if index == len(others) - 1 else next_y
        middle = (y + end) / 2
        line += f"C{x:.0f} {middle:.0f} {next_x:.0f} {middle:.0f} {next_x:.0f} {end:.0f}"
        x, y = next_x, end
    return line


def _box(label: str, x: float, y: float) -> str:
    width = _width(label)
    return (
        f'<rect x="{x - width / 2:.0f}" y="{y - _HEIGHT / 2:.0f}" width="{width:.0f}" height="{_HEIGHT:.0f}" rx="6"/>'
        f'<text x="{x:.0f}" y="{y + 4.5:.1f}" text-anchor="middle">{escape(label)}</text>'
    )
