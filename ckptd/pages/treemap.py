"""A treemap of the entries of a checkpoint: areas are bytes, grouped by item and by the path of the module. Pure.

At most a few hundred boxes are drawn: entries that are too small to see are folded into one box.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

_PARTS = re.compile(r"[^/.]+")
_DIGITS = re.compile(r"([0-9]+)")
WIDTH, HEIGHT = 1088.0, 480.0
_MIN_AREA = 600.0
"""Smaller boxes are folded."""
_GROUP_AREA = 9_000.0
"""A box of at least this area shows its children."""
_HEADER = 17.0
_GAP = 1.5
_MAX_DEPTH = 4
_MAX_PARTS = 8
_MAX_BOXES = 400
_CHARACTER = 7.2
_MIN_CHARACTERS = 6
"""Minimum length of a truncated name."""
_NUM_KINDS = 6


@dataclass(frozen=True, slots=True)
class Area:
    """Position and size of a box."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Rect:
    """One box of the drawing. Groups come before their children."""

    area: Area
    label: str
    """The label that fits into it; may be empty."""
    path: str
    num_entries: int
    bytes: int
    kind: int
    """The color of its item."""
    group: bool
    """Whether it contains other boxes."""


@dataclass(slots=True)
class _TreeNode:
    name: str
    path: str
    bytes: int = 0
    num_entries: int = 0
    children: dict[str, _TreeNode] = field(default_factory=dict)


def treemap(sizes: Mapping[str, int], width: float = WIDTH, height: float = HEIGHT) -> list[Rect]:
    """Boxes for entries of these sizes. Entries without bytes are not drawn."""
    root = _tree(sizes)
    boxes: list[Rect] = []
    for kind, (node, area) in enumerate(_laid_out(_folded(root, width * height), Area(0, 0, width, height))):
        _draw(node, area, kind % _NUM_KINDS, 1, boxes)
    return boxes


def squarified(sizes: Sequence[float], area: Area) -> list[Area]:
    """Rectangles that fill the area, as square as possible. sizes: positive, in descending order."""
    scale = area.width * area.height / (sum(sizes) or 1)
    scaled = [size * scale for size in sizes]
    found: list[Area] = []
    start = 0
    while start < len(scaled):
        side = min(area.width, area.height)
        end = start + 1
        while end < len(scaled) and _worst(scaled[start : end + 1], side) <= _worst(scaled[start:end], side):
            end += 1
        row, area = _row(scaled[start:end], area)
        found += row
        start = end
    return found


def _worst(row: Sequence[float], side: float) -> float:
    """The worst aspect ratio in a row."""
    total = sum(row)
    if not total or not side:
        return float("inf")
    return max(side * side * max(row) / (total * total), total * total / (side * side * min(row)))


def _row(row: Sequence[float], area: Area) -> tuple[list[Area], Area]:
    """A row along the shorter side, and the remaining area."""
    upright = area.width >= area.height
    side, depth = (area.height, area.width) if upright else (area.width, area.height)
    total = sum(row)
    # Bounded by the area, because sums of floats may exceed it.
    thick = min(depth, total / side) if side else 0.0
    at = area.y if upright else area.x
    found = []
    for size in row:
        length = side * size / total if total else 0.0
        found.append(Area(area.x, at, thick, length) if upright else Area(at, area.y, length, thick))
        at += length
    if upright:
        return found, Area(area.x + thick, area.y, area.width - thick, area.height)
    return found, Area(area.x, area.y + thick, area.width, area.height - thick)


def _tree(sizes: Mapping[str, int]) -> _TreeNode:
    root = _TreeNode("", "")
    for name, size in sizes.items():
        if size <= 0:
            continue
        node = root
        for part in islice(_PARTS.finditer(name), _MAX_PARTS):
            node = node.children.setdefault(part[0], _TreeNode(part[0], name[: part.end()]))
            node.bytes += size
            node.num_entries += 1
        root.bytes += size
        root.num_entries += 1
    return root


def _draw(node: _TreeNode, area: Area, kind: int, depth: int, boxes: list[Rect]) -> None:
    node = _without_single_children(node)
    inner = Area(area.x + _GAP, area.y + _HEADER, area.width - 2 * _GAP, area.height - _HEADER - _GAP)
    room = inner.width * inner.height if inner.width > 40 and inner.height > 20 else 0
    group = bool(node.children) and room >= _GROUP_AREA and depth < _MAX_DEPTH and len(boxes) < _MAX_BOXES
    label = _fitting(node.name, area)
    boxes.append(Rect(area, label, node.path, node.num_entries, node.bytes, kind, group))
    if group:
        for child, place in _laid_out(_folded(node, room), inner):
            _draw(child, place, kind, depth + 1, boxes)


def _without_single_children(node: _TreeNode) -> _TreeNode:
    """Merge chains of modules that have a single child."""
    while len(node.children) == 1:
        (child,) = node.children.values()
        if not child.children:
            break
        node = _TreeNode(f"{node.name}.{child.name}", child.path, node.bytes, node.num_entries, child.children)
    return node


def _folded(node: _TreeNode, room: float) -> list[_TreeNode]:
    """The children, largest first; those that are too small to see are folded into one, which comes last."""
    children = sorted(node.children.values(), key=lambda child: (-child.bytes, _natural(child.name)))
    least = node.bytes * _MIN_AREA / room if room else 0
    large = [child for child in children if child.bytes >= least]
    small = children[len(large) :]
    if len(small) < 2:
        return children
    rest = _TreeNode(f"{len(small)} more", f"{node.path} ({len(small)} more)".strip())
    rest.bytes = sum(child.bytes for child in small)
    rest.num_entries = sum(child.num_entries for child in small)
    return sorted([*large, rest], key=lambda child: -child.bytes)


def _laid_out(nodes: Iterable[_TreeNode], area: Area) -> list[tuple[_TreeNode, Area]]:
    shown = list(nodes)
    return list(zip(shown, squarified([node.bytes for node in shown], area), strict=True))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts blocks.2 before blocks.10."""
    return [(int(part) if len(part) < 10 and part.isdecimal() else 0, part) for part in _DIGITS.split(name)]


def _fitting(name: str, area: Area) -> str:
    """The name, truncated to fit one line of the area."""
    most = int((area.width - 8) / _CHARACTER)
    if area.height < _HEADER or most < min(len(name), _MIN_CHARACTERS):
        return ""
    return name if len(name) <= most else f"{name[: most - 1]}…"
