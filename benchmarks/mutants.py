"""Draw mutants of the package by seed, and record which of them the tests kill.

A mutant is the package with one small fault: a comparison turned, an arithmetic operator exchanged, a whole number one
higher, a condition negated, a statement dropped. The tests that run its line (a coverage file with contexts says which)
are tried until one fails: first those of ``make test``, the most particular ones before the others, then the slow ones
of the same run. A mutant that none kills survives.

  OMP_NUM_THREADS=1 pytest -n 2 -m "not gpu" --cov --cov-context=test --junitxml=tests.xml
  python benchmarks/mutants.py --coverage .coverage --durations tests.xml

  python benchmarks/mutants.py --again                       the record's own mutants that were killed, without coverage

``--again`` finds each by its text and the text of its line, in whatever file and line they are now; code that is there
no more is ``gone``. Tried are the test that killed it, its like and its file, then tests whose files name the module.

The exit code is 1 where the quick tests kill less than 95 % of what all of them kill. A run that was stopped goes on.

Each process works on a copy of the tree, so that commands that tests start see the mutant, too. Triton's kernels are
left out: a CPU runs them in an interpreter, if at all. What this does not say: that a survivor is a fault of the tests;
some mutants mean the same as the original.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "subtoken_train"
RECORD = ROOT / "benchmarks" / "results" / "mutants.json"
LEFT_OUT = ("triton", "__main__")
NOT_COPIED = (".git", ".venv", "__pycache__", "runs", "site", "dist", "*_cache")
SECONDS = 40.0
"""Of quick tests at most, by their own durations, and as much of slow ones, that a mutant has to survive."""
FIRST = 40
"""Tests that are tried before the others are collected: most mutants die of them."""
MANY = 200
"""Tests that are tried where nothing says how long each takes."""
SHARE = 0.95
"""Of all kills, those that the quick tests must do."""
ALIKE = 0.6
"""How alike two lines are, at least, for a mutant of the one to be that of the other."""
NAME = re.compile(r"(.+?):(\d+) (\w+): (.*) -> (.*)", re.DOTALL)
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
        code: the line's text, by which it is found where the line has moved.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str
    code: str

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
            yield Mutant(file, node.lineno, kind, start, end, text[start:end], after, lines[node.lineno - 1].strip())


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


Job = tuple[Mutant, list[str], list[str]]
"""A mutant with the quick and the slow tests that are tried on it."""


def of_package() -> Iterator[Mutant]:
    """Yield every mutant of the package."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        if not any(name in path.stem for name in LEFT_OUT):
            yield from mutants_of(str(path.relative_to(ROOT)), path.read_text())


def draw(seed: int, count: int, covered: Mapping[str, set[int]]) -> list[Mutant]:
    """Return mutants of lines that some test runs, drawn by seed from all files alike."""
    every = [mutant for mutant in of_package() if mutant.line in covered.get(mutant.file, ())]
    return random.Random(seed).sample(every, min(count, len(every)))


def found_again(each: Mapping[str, Any], every: Iterable[Mutant]) -> Mutant | None:
    """Return a record's mutant as the package has it now: of the most similar line, of its own file where two are."""
    parts = NAME.fullmatch(each["name"])
    assert parts is not None
    file, line, *fault = parts.groups()
    stem = Path(file).stem

    def likeness(one: Mutant) -> tuple[float, bool, bool, int]:
        alike = 1.0 if one.code == each["code"] else SequenceMatcher(None, one.code, each["code"]).ratio()
        return alike, one.file == file, Path(one.file).stem == stem, -abs(one.line - int(line))

    same = [one for one in every if [one.kind, one.before, one.after] == fault]
    best = max(same, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= ALIKE else None


def _apart(known: str, name: str) -> tuple[bool | str, ...]:
    """How far a test is from a known one: of another function, in another file too, with other parameters."""
    files, names = (each.partition("::")[0] for each in (known, name)), (known, name)
    functions = (each.rpartition("::")[2].partition("[")[0] for each in (known, name))
    return *(len({*pair}) > 1 for pair in (functions, files, names)), name


def again(record: Sequence[dict[str, Any]]) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return the jobs of a record's killed mutants, and what is not tried: survivors, and code that has gone."""
    every, quick, slow = list(of_package()), collected("not slow and not gpu"), collected("slow and not gpu")
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    jobs: list[Job] = []
    rest: list[dict[str, Any]] = []
    for each in record:
        mutant = found_again(each, every)
        if mutant is None:
            rest.append({**each, "killed_by": None, "how": "gone", "test": ""})
        elif each["killed_by"] is None:
            rest.append({**each, "name": mutant.name, "code": mutant.code})
        else:
            module = mutant.file.removesuffix(".py").replace("/", ".")
            known = each["test"]
            head = f"def {known.rpartition('::')[2].partition('[')[0]}("  # its file may have another name now
            near = {known.partition("::")[0], *(file for file, text in tests.items() if module in text or head in text)}
            tried = sorted((name for name in quick if name.partition("::")[0] in near), key=partial(_apart, known))
            jobs.append((mutant, tried[:MANY], [known] if known in slow else []))
    return jobs, rest


class Coverage:
    """Tests by the line that they run, and their durations; tests that are not there any more are left out."""

    def __init__(self, coverage: Path, durations: Path, there: Collection[str]) -> None:
        from coverage import CoverageData

        data = CoverageData(str(coverage))
        data.read()
        self.by_line: dict[str, dict[int, list[str]]] = {}
        for measured in data.measured_files():
            if f"/{PACKAGE}/" in measured:
                file = f"{PACKAGE}/{measured.partition(f'/{PACKAGE}/')[2]}"
                self.by_line[file] = {
                    line: sorted({name.partition("|")[0] for name in names}.intersection(there))
                    for line, names in data.contexts_by_lineno(measured).items()
                }
        self.extent = Counter(name for lines in self.by_line.values() for tests in lines.values() for name in tests)
        self.seconds = {
            f"{case.get('file') or _file(case)}::{case.get('name')}": float(case.get("time") or 0)
            for case in ElementTree.parse(durations).iter("testcase")
        }

    def lines(self) -> dict[str, set[int]]:
        """Return the lines of each file that a test runs."""
        return {file: {line for line, tests in lines.items() if tests} for file, lines in self.by_line.items()}

    def tests(self, mutant: Mutant, quick: Collection[str]) -> tuple[list[str], list[str]]:
        """Return the quick and the slow tests that run a mutant's line, as many as ``SECONDS`` hold of either.

        Those that run the fewest lines come first: a fault is likelier to be what they are about.
        """
        tests = sorted(self.by_line[mutant.file][mutant.line], key=lambda name: (self.extent[name], name))
        ours = [name for name in tests if name in quick]
        return self._few(ours), self._few([name for name in tests if name not in quick])

    def _few(self, tests: Sequence[str]) -> list[str]:
        spent = accumulate(self.seconds.get(name, 1.0) for name in tests)
        return [name for name, total in zip(tests, spent, strict=True) if total <= SECONDS] or list(tests[:1])


def collected(marks: str) -> set[str]:
    """Return the names of the tests of these marks."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line for line in lines if "::" in line}


def _file(case: ElementTree.Element) -> str:
    """Return a test's file from its class name in JUnit's form: ``tests.cache.test_pack`` or a class below it."""
    parts = (case.get("classname") or "").split(".")
    last = max((i for i, part in enumerate(parts) if part.startswith("test_")), default=len(parts) - 1)
    return "/".join(parts[: last + 1]) + ".py"


class _First:
    """Notes the first test, or file of tests, that fails."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a test."""
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be imported."""
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self.place.exists():
            self.place.write_text(report.nodeid)


def _try(tree: Path, tests: Sequence[str], failed: Path) -> None:
    """Run tests in this process, which ends with pytest's exit code."""
    import pytest

    os.chdir(tree)
    sys.path.insert(0, str(tree))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests], plugins=[_First(failed)]))


class Tree:
    """A copy of the tree, in which mutants are tried one after another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sound: set[str] = set()
        self.unsound: set[str] = set()

    def fails(self, tests: Sequence[str]) -> tuple[str | None, str]:
        """Return how one of the tests fails, or None, and which."""
        failed = self.path.parent / "failed"
        failed.unlink(missing_ok=True)
        process = multiprocessing.get_context("fork").Process(target=_try, args=(self.path, tests, failed))
        process.start()
        process.join(4 * SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return "late", ""
        name = failed.read_text() if failed.exists() else ""
        return (None if process.exitcode == 0 else "failed" if name else "broken"), name

    def kills(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str | None, str]:
        """Return how a mutant is killed, or None, and by which test; one that fails without the mutant kills none."""
        path = self.path / mutant.file
        whole = path.read_text()
        while tests := [name for name in tests if name not in self.unsound]:
            path.write_text(mutant.applied(whole))
            try:
                how, name = self.fails(tests)
            finally:
                path.write_text(whole)
            if how is None or name in self.sound:
                return how, name
            if self.fails([name] if name else tests)[0] is None:
                self.sound |= {name} - {""}
                return how, name
            failing = {each for each in tests if each == name or each.startswith(f"{name}::")}
            self.unsound |= failing if name else self.broken(tests)
        return None, ""

    def broken(self, tests: Sequence[str]) -> set[str]:
        """Return those of the tests that end badly on their own, without a mutant: their names cannot be given, say."""
        if self.fails(tests)[0] is None:
            return set()
        if len(tests) == 1:
            return set(tests)
        half = len(tests) // 2
        return self.broken(tests[:half]) | self.broken(tests[half:]) or set(tests)

    def verdict(self, mutant: Mutant, quick: Sequence[str], slow: Sequence[str]) -> dict[str, Any]:
        """Return who kills a mutant, and how."""
        clock = time.monotonic()
        killed_by, how, test = None, None, ""
        for kind, tests in (("quick", quick[:FIRST]), ("quick", quick[FIRST:]), ("slow", slow)):
            how, test = self.kills(mutant, tests)
            if how:
                killed_by = kind
                break
        tried = {"quick": len(quick), "slow": len(slow), "seconds": round(time.monotonic() - clock, 1)}
        named = {"name": mutant.name, "code": mutant.code}
        return {**named, "killed_by": killed_by, "how": how or "survived", "test": test, **tried}


def _work(rank: int, jobs: Sequence[Job], results: Any) -> None:
    """Try the mutants of one process in a copy of the tree of its own; libraries are imported once, the package not."""
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import lightning  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix=f"mutants-{rank}-") as folder:
        tree = Path(folder) / ROOT.name
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        os.environ["PYTHONPATH"] = str(tree)
        tried = Tree(tree)
        for job in jobs:
            results.put(tried.verdict(*job))


def try_all(jobs: Sequence[Job], processes: int) -> Iterator[dict[str, Any]]:
    """Yield what came of each mutant, tried in as many processes."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [spawn.Process(target=_work, args=(i, jobs[i::processes], results)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for _ in jobs:
        yield results.get()
    for worker in workers:
        worker.join()


def main() -> int:
    """Try the mutants that the record lacks, and write each as it comes."""
    from benchmarks.pairs import hardware, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coverage", type=Path, help="of a run with --cov-context=test")
    parser.add_argument("--durations", type=Path, help="JUnit file of the same run")
    parser.add_argument("--again", action="store_true", help="try the record's mutants; the record is written to --out")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help=f"default: {RECORD.name}, or with --again a file beside it")
    args = parser.parse_args()
    out = args.out or (RECORD.with_name("mutants_again.json") if args.again else RECORD)
    found = {each["name"]: each for each in json.loads(out.read_text())["each"]} if out.exists() else {}
    if args.again:
        jobs, rest = again(json.loads(RECORD.read_text())["each"][: args.count])
    else:
        if not (args.coverage and args.durations):
            parser.error("--coverage and --durations say which tests run a line; --again needs neither")
        quick = collected("not slow and not gpu")
        coverage = Coverage(args.coverage, args.durations, quick | collected("slow and not gpu"))
        jobs = [(each, *coverage.tests(each, quick)) for each in draw(args.seed, args.count, coverage.lines())]
        rest = []
    found = {job[0].name: found[job[0].name] for job in jobs if job[0].name in found} | {x["name"]: x for x in rest}
    jobs = [job for job in jobs if job[0].name not in found]
    for number, each in enumerate(try_all(jobs, args.processes), 1):
        found[each["name"]] = each
        told = each["killed_by"] or "survived"
        print(f"{number} of {len(jobs)}: {told}, {each['seconds']} s, {each['name']}", flush=True)
        write({"seed": args.seed, "hardware": hardware(), **counted(found.values())}, out)
    counts = counted(found.values())
    print(f"{counts['killed_by_quick']} of {counts['killed']} kills are the quick tests'; {counts['mutants']} mutants")
    return int(counts["killed_by_quick"] < SHARE * counts["killed"])


def counted(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a record's counts and its mutants by name: killed by quick tests, by any, and each."""
    each = sorted(found, key=lambda one: str(one["name"]))
    by = Counter(one["killed_by"] for one in each)
    return {"mutants": len(each), "killed": by["quick"] + by["slow"], "killed_by_quick": by["quick"], "each": each}


if __name__ == "__main__":
    sys.exit(main())
