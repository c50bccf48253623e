"""Draw mutants of the package by seed, and record which of them the tests kill.

A mutant is the package with one small fault: a comparison turned, an arithmetic operator exchanged, a whole number one
higher, a condition negated, a statement dropped. The tests that run its line (a coverage file with contexts says which)
are tried, quickest first, until one fails; a mutant that none kills survives.

  OMP_NUM_THREADS=1 pytest -m "not slow and not gpu" --cov --cov-context=test --junitxml=quick.xml
  python benchmarks/mutants.py run --coverage .coverage --durations quick.xml --out quick.json
  python benchmarks/mutants.py compare before.json after.json       exit code 1 where less than 95 % of kills are left

Each process works on a copy of the tree, so that commands that tests start see the mutant, too. Triton's kernels are
left out: a CPU runs them in an interpreter, if at all. What this does not say: that a survivor is a fault of the tests;
some mutants mean the same as the original.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "subtoken_train"
LEFT_OUT = ("triton", "__main__")
TREE = (PACKAGE, "tests", "benchmarks", "recipes", "checkpoints", "data", "docs", "pyproject.toml", "README.md")
SECONDS = 60.0
"""Of tests at most, by their own durations, that a mutant has to survive; beyond, none was quicker to fail."""
COMPARED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COUNTED: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        file: below the root.
        line: its first.
        kind: comparison, arithmetic, number, condition or dropped.
        start: offset of the code that is replaced, in characters.
        end: likewise.
        before: that code.
        after: what stands in its place.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """A short name that a record and a reader share."""
        return f"{self.file}:{self.line} {self.kind}: {self.before} -> {self.after}"

    def applied(self, text: str) -> str:
        """Return a file's text with the fault in it."""
        return text[: self.start] + self.after + text[self.end :]


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Yield every mutant of a file, in order."""
    lines = [f"{line}\n" for line in text.split("\n")]
    starts = [0, *accumulate(map(len, lines))]

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    tree = ast.parse(text)
    for node in _in_functions(tree):
        for kind, after in _faults(node):
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
            yield Mutant(file, node.lineno, kind, start, end, text[start:end], after)


def _in_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what functions run: no annotations, no defaults of dataclasses, no text of an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            left_out = {id(below) for each in ast.walk(node) for below in _annotations(each)}
            yield from (each for each in _own(node) if id(each) not in left_out)


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's statements, those of functions inside left to these."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.JoinedStr):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.AnnAssign):
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ("cast", "Literal"):
        yield from ast.walk(node)


def _faults(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kind and the new code of every fault of one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        turned = ast.Compare(node.left, [COMPARED[type(node.ops[0])]()], node.comparators)
        yield "comparison", f"({ast.unparse(turned)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in COUNTED and not _is_text(node.left):
        yield "arithmetic", f"({ast.unparse(ast.BinOp(node.left, COUNTED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "number", str(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "condition", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(
        node, ast.AugAssign | ast.Raise
    ):
        yield "dropped", "pass"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def draw(seed: int, count: int, covered: Mapping[str, set[int]]) -> list[Mutant]:
    """Return mutants of lines that some test runs, drawn by seed from all files alike."""
    every: list[Mutant] = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not any(name in path.stem for name in LEFT_OUT):
            lines = covered.get(file, set())
            every += [mutant for mutant in mutants_of(file, path.read_text()) if mutant.line in lines]
    return random.Random(seed).sample(every, min(count, len(every)))


class Coverage:
    """Tests by the line that they run, and their durations."""

    def __init__(self, coverage: Path, durations: Path) -> None:
        from coverage import CoverageData

        data = CoverageData(str(coverage))
        data.read()
        self.by_line: dict[str, dict[int, list[str]]] = {}
        for measured in data.measured_files():
            if f"/{PACKAGE}/" in measured:
                file = f"{PACKAGE}/{measured.partition(f'/{PACKAGE}/')[2]}"
                self.by_line[file] = {
                    line: sorted({name.partition("|")[0] for name in names if name})
                    for line, names in data.contexts_by_lineno(measured).items()
                }
        self.seconds = {
            f"{case.get('file') or _file(case)}::{case.get('name')}": float(case.get("time") or 0)
            for case in ElementTree.parse(durations).iter("testcase")
        }

    def lines(self) -> dict[str, set[int]]:
        """Return the lines of each file that a test runs."""
        return {file: {line for line, tests in lines.items() if tests} for file, lines in self.by_line.items()}

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's line, quickest first, as many as ``SECONDS`` hold."""
        tests = sorted(self.by_line[mutant.file][mutant.line], key=lambda name: (self.seconds.get(name, 1.0), name))
        spent = accumulate(self.seconds.get(name, 1.0) for name in tests)
        return [name for name, total in zip(tests, spent, strict=True) if total <= SECONDS] or tests[:1]


def _file(case: ElementTree.Element) -> str:
    """Return a test's file from its class name in JUnit's form: ``tests.cache.test_pack`` or a class below it."""
    parts = (case.get("classname") or "").split(".")
    last = max((i for i, part in enumerate(parts) if part.startswith("test_")), default=len(parts) - 1)
    return "/".join(parts[: last + 1]) + ".py"


def _try(tree: Path, tests: Sequence[str]) -> None:
    """Run tests in this process, which ends with pytest's exit code."""
    import pytest

    os.chdir(tree)
    sys.path.insert(0, str(tree))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]))


def verdict(tree: Path, mutant: Mutant, tests: Sequence[str], patience: float) -> dict[str, Any]:
    """Put a mutant into a copy of the tree, try the tests, and take it out again."""
    path, clock = tree / mutant.file, time.monotonic()
    whole = path.read_text()
    path.write_text(mutant.applied(whole))
    try:
        process = multiprocessing.get_context("fork").Process(target=_try, args=(tree, tests))
        process.start()
        process.join(patience)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
    finally:
        path.write_text(whole)
    survived = not late and process.exitcode == 0
    return {
        **asdict(mutant),
        "name": mutant.name,
        "killed": not survived,
        "how": "survived" if survived else "late" if late else "failed" if process.exitcode == 1 else "broken",
        "tests": len(tests),
        "seconds": round(time.monotonic() - clock, 1),
    }


def _work(rank: int, jobs: Sequence[tuple[Mutant, list[str]]], results: Any) -> None:
    """Try the mutants of one process in a copy of the tree of its own; libraries are imported once, the package not."""
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import lightning  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix=f"mutants-{rank}-") as folder:
        tree = Path(folder) / ROOT.name
        for name in TREE:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name) if source.exists() else None
        os.environ["PYTHONPATH"] = str(tree)
        for mutant, tests in jobs:
            results.put(verdict(tree, mutant, tests, patience=4 * SECONDS))


def run(args: argparse.Namespace) -> int:
    """Try mutants in two processes and write what came of them."""
    coverage = Coverage(args.coverage, args.durations)
    mutants = draw(args.seed, args.count, coverage.lines())
    jobs = [(mutant, coverage.tests(mutant)) for mutant in mutants]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [spawn.Process(target=_work, args=(i, jobs[i :: args.processes], results)) for i in range(args.processes)]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    while len(found) < len(jobs):
        found.append(results.get())
        print(
            f"{len(found)} of {len(jobs)}: {found[-1]['how']}, {found[-1]['seconds']} s, {found[-1]['name']}",
            flush=True,
        )
    for worker in workers:
        worker.join()
    from benchmarks.pairs import hardware, write

    found.sort(key=lambda each: str(each["name"]))
    killed = sum(each["killed"] for each in found)
    record = {"seed": args.seed, "hardware": hardware(), "mutants": len(found), "killed": killed, "each": found}
    write(record, args.out)
    print(f"{killed} of {len(found)} killed")
    return 0


def compare(before: Mapping[str, Any], after: Mapping[str, Any], share: float) -> tuple[list[str], bool]:
    """Return the mutants that the tests before killed and those after do not, and whether enough kills are left.

    Raises:
        ValueError: the two did not try the same mutants.
    """
    tried = [{each["name"]: each["killed"] for each in record["each"]} for record in (before, after)]
    if tried[0].keys() != tried[1].keys():
        raise ValueError("the two records tried other mutants; take one seed, one count and one state of the package")
    killed = [name for name, was in tried[0].items() if was]
    lost = [name for name in killed if not tried[1][name]]
    return lost, len(killed) - len(lost) >= share * len(killed)


def main() -> int:
    """Read the command and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trying = commands.add_parser("run", help="try mutants")
    trying.add_argument("--coverage", type=Path, required=True, help="of a run with --cov-context=test")
    trying.add_argument("--durations", type=Path, required=True, help="JUnit file of the same run")
    trying.add_argument("--count", type=int, default=300)
    trying.add_argument("--seed", type=int, default=1)
    trying.add_argument("--processes", type=int, default=2)
    trying.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--share", type=float, default=0.95, help="of the kills that must be left")
    args = parser.parse_args()
    if args.command == "run":
        return run(args)
    lost, enough = compare(json.loads(args.before.read_text()), json.loads(args.after.read_text()), args.share)
    print(*lost, f"{len(lost)} mutants are no longer killed", sep="\n")
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main())
