"""Rules of the source tree that a program can check: import direction, function length, docstrings."""

import ast
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "subtoken_train"

ROOMS = [
    set(room.split())
    for room in (
        "types errors forks moved resources documents outputs typed registry calibrations version settings",
        "functional", "ledger", "kernels", "view", "routing reducers evictions cache", "families", "engine", "artifact",
        "datasets inference", "training evaluation", "calibrating benchmarking demo serving", "cli",
        "plugins __main__",
    )
]  # fmt: skip
"""From the bottom up; a room may import from those below it and beside it."""
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
STRANGERS = {frozenset({"training", "evaluation"})}

MOST_LINES_OF_A_FUNCTION = 60
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    """Return a file's tree, parsed once for all rules."""
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    """The room of a source file: its folder or, for a file at the top, its own name."""
    return path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")


def imported_names(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Yield every dotted name that a file imports, anywhere; ``package``: its own parts, for relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def undocumented(tree: ast.Module | ast.ClassDef, prefix: str, inherited: Collection[str] = ()) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring; an override has that of what it overrides."""
    if ast.get_docstring(tree) is None:
        yield prefix
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node, f"{prefix}.{node.name}", inherited if node.bases else ())
        elif node.name in (inherited if isinstance(tree, ast.ClassDef) else COMMAND if "/cli/" in prefix else ()):
            continue
        elif ast.get_docstring(node) is None and "overload" not in map(ast.unparse, node.decorator_list):
            yield f"{prefix}.{node.name}"


def test_imports_point_down():
    errors = {}
    for path in set(SOURCES) - {ROOT / PACKAGE / "__init__.py"}:  # the public names come from every room
        room = room_of(path)
        assert room in RANK, f"{label(path)}: {room!r} is no room of the package; add it to ROOMS at its height"
        parts = [name.split(".") for name in imported_names(parsed(path), list(path.relative_to(ROOT).parent.parts))]
        rooms = sorted({part[1] for part in parts if part[0] == PACKAGE and len(part) > 1 and part[1] in RANK})
        found = [f"{room} may not import {each}, which is above it" for each in rooms if RANK[each] > RANK[room]]
        found += [f"{room} may not import {each}" for each in rooms if frozenset({room, each}) in STRANGERS]
        errors |= {label(path): found} if found else {}
    assert errors == {}


def file_arrows() -> dict[str, set[str]]:
    """Every file of the package and the files it imports from, wherever the import stands."""
    files = {label(x).removesuffix(".py").removesuffix("/__init__").replace("/", "."): label(x) for x in SOURCES}
    arrows = {}
    for path in SOURCES:
        names = imported_names(parsed(path), list(path.relative_to(ROOT).parent.parts))
        targets = {files.get(name) or files.get(name.rpartition(".")[0]) for name in names}
        arrows[label(path)] = {target for target in targets if target is not None and target != label(path)}
    return arrows


def folder_arrows() -> dict[str, set[str]]:
    """The same of folders: a room inside a room is one of its own; a registry (``__init__``) belongs to its folder."""
    arrows: dict[str, set[str]] = {}
    for name, targets in file_arrows().items():
        folder = name.rpartition("/")[0]
        if folder != PACKAGE:  # the top holds files of many heights, see ROOMS
            found = {target.rpartition("/")[0] for target in targets}
            arrows.setdefault(folder, set()).update(found - {folder, PACKAGE})
    return arrows


@pytest.mark.parametrize("arrows", [file_arrows, folder_arrows])
def test_imports_go_in_no_circle(arrows):
    TopologicalSorter(arrows()).prepare()  # a circle is a CycleError, which names it


METHOD_ROOMS = {"routing", "reducers", "evictions"}  # rooms of one method a file, each with a ``random.py`` of its own
COMMAND = {"add_arguments", "run", "run_raw", "help_text", "main"}  # of commands: ``cli/main.py`` says what they do
"""What the command line calls in a command's file; ``main`` is a program's."""


def names_twice(names: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand in several places, and where."""
    places: dict[str, list[str]] = {}
    for name, place in names:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_file_name_means_one_thing():
    """Exempt are methods' rooms and protocols (``base``), and commands, named for what they make."""
    files = [path for path in SOURCES if path.stem not in ("__init__", "__main__", "base")]
    elsewhere = [path for path in files if room_of(path) not in METHOD_ROOMS]
    commands = {path for path in elsewhere if path.parent.name == "cli" and "\nHELP = " in path.read_text()}
    assert names_twice((path.stem, label(path)) for path in elsewhere if path not in commands) == {}


def test_a_public_name_means_one_thing():
    def public() -> Iterator[tuple[str, str]]:
        for path in SOURCES:
            for node in parsed(path).body:
                named = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
                if named and node.name not in COMMAND:
                    yield node.name, label(path)

    assert names_twice(public()) == {}


def test_public_names_have_docstrings():
    classes = (node for path in SOURCES for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))
    methods = (node for each in classes for node in each.body if isinstance(node, ast.FunctionDef))
    inherited = {node.name for node in methods if ast.get_docstring(node) is not None}
    assert [name for path in SOURCES for name in undocumented(parsed(path), label(path), inherited)] == []


def long_functions(tree: ast.AST) -> dict[str, int]:
    """Functions of more lines than one thing takes, and their lines without the docstring."""
    lengths = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            words = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
            lengths[node.name] = (node.end_lineno or 0) - node.lineno + 1 - words
    return {name: length for name, length in lengths.items() if length > MOST_LINES_OF_A_FUNCTION}


@pytest.mark.parametrize("folder", [PACKAGE, "checkpoints", "benchmarks", "docs"])
def test_functions_stay_short(folder):
    found = {label(path): long_functions(parsed(path)) for path in (ROOT / folder).rglob("*.py")}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_test_files_have_names_of_their_own():
    """pytest imports them by their base names."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


KNOWS_BYTES = {"functional/quantized.py", "families/images.py", "families/lora.py"}
"""Weights of bitsandbytes and pixels; how keys and values are stored, ``kernels/formats.py`` alone knows."""


def test_only_formats_know_how_vectors_are_stored():
    """No other file compares something with an integer dtype of a byte."""
    for path in SOURCES:
        compared = [part for node in ast.walk(parsed(path)) if isinstance(node, ast.Compare) for part in ast.walk(node)]
        if {part.attr for part in compared if isinstance(part, ast.Attribute)} & {"uint8", "int8"}:
            assert path.relative_to(ROOT / PACKAGE).as_posix() in KNOWS_BYTES
