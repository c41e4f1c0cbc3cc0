"""The shape of the source, from its import statements: circles, size of files, and a test folder per folder.

Layers are checked by import-linter, as is what a package may not import: `make check`.
"""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckpt.config import Config
from ckptctl.manual import SECTIONS

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PACKAGES = [contract["containers"][0] for contract in CONTRACTS if "containers" in contract]
FOLDERS = {name: ROOT / name if name == "ckptd" else ROOT / "client" / name for name in PACKAGES}

SMALL = 60
"""A file with fewer lines and a single importer belongs into that importer."""
MAY_BE_SMALL = ("ckptd.api.", "ckptctl.commands.", "ckptapi.bodies.", "ckptapi.mlflow", "ckptd.index.migrations.")

CEILINGS = {"tokens": 390_891, "files": 317, "knobs": 26, "verbs": 38, "threads": 26}
"""Sizes of the product, which only fall. A feature that needs more takes away as much elsewhere."""

FOLDER_SHAPES = {
    "ckpt.snapshot": (7, 24),
    "ckpt.restoring": (5, 24),
    "ckpt.saver": (5, 26),
    "ckpt.capture": (6, 45),
    "ckptstore.format": (6, 26),
    "ckptstore.commits": (4, 10),
    "ckptd.pages": (4, 11),
    "ckptd.services": (2, 5),
}
"""Levels (files on the longest chain of imports inside the folder) and arrows (pairs of files, one of which imports
the other), which only fall."""

TESTED_BY_NAME = 75
"""Per cent of the files with more than `SMALL` lines that have a test file of their own, which only rises."""

TORCH_FOLDERS = ("ckpt.data", "ckpt.dcp", "ckpt.foreign", "ckpt.integrations")
"""Loaded only by programs that have torch."""

Graph = Mapping[str, set[str]]


@cache
def _trees() -> dict[str, ast.Module]:
    """The syntax tree of each module of the product."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


@cache
def _imports() -> dict[str, set[str]]:
    """Which modules of the product each one imports, anywhere in it: also in functions and for type checkers."""
    trees = _trees()
    return {name: set(_imported(tree, trees)) - {name} for name, tree in trees.items()}


def _imported(tree: ast.Module, known: Mapping[str, Any]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module in known:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


def _users() -> dict[str, set[str]]:
    """Who imports each module; a name that a package's `__init__` passes on counts as imported from its source."""
    source = {
        (package, alias.name): node.module
        for package, tree in _trees().items()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in _trees()
        for alias in node.names
    }
    users: dict[str, set[str]] = {name: set() for name in _trees()}
    for name, tree in _trees().items():
        for imported in _imports()[name]:
            users[imported].add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                passed_on = {source.get((node.module or "", alias.name)) for alias in node.names} - {None, name}
                for module in passed_on:
                    users[module].add(name)  # type: ignore[index]
    return users


def _circles(graph: Graph) -> list[list[str]]:
    """Modules on an import cycle with their imports on it: the rest after removing modules without imports."""
    left = dict(graph)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    # What only leads into a circle is not in one.
    while free := [name for name in left if not any(name in targets for targets in left.values())]:
        for name in free:
            del left[name]
    return [[name, *sorted(left[name] & left.keys())] for name in sorted(left)]


def _part(package: str, module: str) -> str | None:
    """The file or folder of the package that a module is or lies in; None for the package itself."""
    return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else None


def _arrows(package: str) -> dict[str, set[str]]:
    """Which files and folders of the package each one imports."""
    arrows: dict[str, set[str]] = {}
    for name, targets in _imports().items():
        if part := _part(package, name):
            parts = {_part(package, target) for target in targets}
            arrows.setdefault(part, set()).update(p for p in parts if p is not None and p != part)
    return arrows


def _files(folder: str) -> dict[str, set[str]]:
    """Which files of the folder each of its files imports."""
    inside = {name for name in _trees() if name.rpartition(".")[0] == folder}
    return {name: _imports()[name] & inside for name in inside}


def _levels(graph: Graph) -> int:
    """The number of files on the longest chain of imports."""

    @cache
    def height(name: str) -> int:
        return 1 + max((height(target) for target in graph[name]), default=0)

    return max(map(height, graph))


def _at_import(tree: ast.Module) -> ast.Module:
    """The import statements that run when the module is loaded."""
    body = list(tree.body)
    for node in body:
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)):
            body.extend(node.body)
    return ast.Module([node for node in body if isinstance(node, ast.Import | ast.ImportFrom)], [])


def _large_sources() -> dict[str, bool]:
    """The files of more than `SMALL` lines, as <package>/<path>, and whether each has a test file of its own."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            name = Path(package) / path.relative_to(folder)
            if len(path.read_text().splitlines()) > SMALL and "migrations" not in name.parts and name.name[:2] != "__":
                found[str(name)] = (ROOT / "tests" / name.parent / f"test_{name.name}").exists()
    return found


def _tokens() -> int:
    """Names, operators and numbers: comments, docstrings and the width of lines do not count."""
    counted = 0
    for folder in FOLDERS.values():
        for path in folder.rglob("*.py"):
            in_text = 0
            with path.open("rb") as file:
                for token in tokenize.tokenize(file.readline):
                    # From Python 3.12 on; before, such a text is one token.
                    in_text += {"FSTRING_START": 1, "FSTRING_END": -1}.get(tokenize.tok_name[token.type], 0)
                    counted += not in_text and token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
    return counted


def _threads() -> int:
    """Places that start a thread or a pool of threads."""
    calls = [node.func for tree in _trees().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(ast.unparse(call).rpartition(".")[2] in ("Thread", "Timer", "ThreadPoolExecutor") for call in calls)


def test_the_product_does_not_grow() -> None:
    sizes = {
        "tokens": _tokens(),
        "files": len(_trees()),
        "knobs": len(fields(Config)),
        "verbs": sum(len(verbs) for verbs in SECTIONS.values()),
        "threads": _threads(),
    }
    assert {name: size for name, size in sizes.items() if size > CEILINGS[name]} == {}


@pytest.mark.parametrize("folder", FOLDER_SHAPES)
def test_the_files_of_a_folder_do_not_lean_on_each_other_more(folder: str) -> None:
    files, (levels, arrows) = _files(folder), FOLDER_SHAPES[folder]
    assert _levels(files) <= levels
    assert sum(map(len, files.values())) <= arrows


def test_files_do_not_import_each_other_in_circles() -> None:
    assert len(_imports()) > 200
    assert _circles(_imports()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_folders_of_a_package_do_not_import_each_other_in_circles(package: str) -> None:
    assert _circles(_arrows(package)) == []


def test_no_small_file_has_a_single_importer() -> None:
    users = _users()
    small = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            name = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            lines = len(path.read_text().splitlines())
            if path.stem.startswith("__") or name.startswith(MAY_BE_SMALL) or lines >= SMALL:
                continue
            if len(users[name]) <= 1:
                small[name] = (lines, *users[name])
    assert small == {}, "merge these (lines, importer) into their importer"


@pytest.mark.parametrize("package", PACKAGES)
def test_each_folder_has_its_folder_of_tests(package: str) -> None:
    folder, tests = FOLDERS[package], ROOT / "tests" / package
    source = {p.parent.relative_to(folder) for p in folder.rglob("*.py") if "migrations" not in p.parts}
    tested = {p.parent.relative_to(tests) for p in tests.rglob("test_*.py")}
    assert tested == source
    strangers = {p.parent.relative_to(tests) for p in tests.rglob("*.py")} - source
    assert strangers == set()


def test_the_tests_of_every_file_are_found_by_its_name_or_in_the_table() -> None:
    """A file of fewer lines is tested with those that use it."""
    table = (ROOT / "tests" / "README.md").read_text()
    rows = [re.findall(r"`([\w/]+\.py)`", line) for line in table.splitlines() if line.startswith("| `")]
    named = {path for row in rows for path in row}
    sources = {
        f"{package}/{p.relative_to(folder)}" for package, folder in FOLDERS.items() for p in folder.rglob("*.py")
    }
    tests = {str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}
    assert named - sources - tests == set(), "these are not there"
    unmirrored = {name for name, mirrored in _large_sources().items() if not mirrored}
    assert unmirrored - named == set(), "these have neither tests of their name nor a row"


def test_most_files_have_a_test_file_of_their_own() -> None:
    mirrored = _large_sources().values()
    assert 100 * sum(mirrored) / len(mirrored) >= TESTED_BY_NAME


def test_torch_is_loaded_only_with_tensors() -> None:
    """Modules that work without torch load those that need it in functions, and take torch from `ckpt.lazily`."""
    statements = {name: _at_import(tree) for name, tree in _trees().items()}
    need = {name for name, tree in statements.items() if "torch" in _imported(tree, {"torch": None})}
    assert "ckpt.capture.tensors" in need
    loads = {name: set(_imported(tree, statements)) for name, tree in statements.items()}
    others = {name for name in loads.keys() - need if not name.startswith(TORCH_FOLDERS)}
    assert {name: loads[name] & need for name in others if loads[name] & need} == {}
    assert {name for name in need if "ckpt.lazily" in loads[name]} == set()


def test_msgspec_inspects_types_in_one_place_only() -> None:
    """Two threads that meet a type for the first time crash the process; see ckptstore.format.decoding."""
    found = {
        name
        for name, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _inspects(ast.unparse(node.func), {one.arg for one in node.keywords})
    }
    assert found == {"ckptstore.format.decoding"}


def _inspects(function: str, keywords: set[str | None]) -> bool:
    return function.startswith("msgspec.") and (function.endswith((".convert", ".Decoder")) or "type" in keywords)


MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60  # we aim at 40
ALL_FOLDERS = ("client", "ckptd", "examples", "bench", "tests")


def test_files_and_functions_stay_small() -> None:
    large: dict[str, int] = {}
    for path in (path for folder in ALL_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            large[name] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                large |= {f"{name}: {node.name}": lines} if lines > MAX_FUNCTION_LINES else {}
    assert large == {}
