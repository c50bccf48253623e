"""Everything that only a GPU can show, unattended: one command, one JSON.

    python -m benchmarks.gpu_suite                             # some hours; goals are printed as they are met or not
    python -m benchmarks.gpu_suite --units decode graph        # these alone, by the starts of their names
    python -m benchmarks.gpu_suite --list                      # names, in their order; nothing runs
    python -m benchmarks.gpu_suite --device cpu --quick        # tiny shapes on a CPU: whether it runs, nothing more

GPU tests; what was never timed (captured answers, packing in one launch, rounded entries, three rows of Table 8);
prompts with routers or statistics; training steps at the size of 7B models; the memory that ``check`` predicts beside
what was measured; decoding steps, routed against token-only, captured and as called (``gpu_units.py``). Each unit runs
in a process of its own with a limit of time, because a kernel that fails can take its process with it: what failed is
recorded and the others go on. Those processes are forked from one in which everything is imported and CUDA is not
started: seconds a unit. The record is written after every unit. A run that was stopped goes on where it was: units that
ended are not run again on the same device by the same sources.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_sizes import FULL, QUICK
from benchmarks.gpu_units import ROOT, Settings, units
from benchmarks.pairs import hardware, markdown, write
from subtoken_train.cli.check import environment
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.kernels.choice import choose_kernel

LIMIT = 3600.0
"""Seconds of a unit."""
LABELS = {False: "full sizes", True: "tiny shapes, which say whether it runs and nothing about speed"}
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["benchmarks.gpu_units"])
Measure = Callable[[str], dict[str, Any]]
"""Runs a unit by its name; an ``error`` in what it gives says why there is no more."""


def unit_of(name: str, device: str, quick: bool) -> dict[str, Any]:
    """One unit at these sizes."""
    quiet_libraries()
    return run_unit(name, Settings(device, torch.bfloat16, QUICK if quick else FULL))


def run_unit(name: str, given: Settings) -> dict[str, Any]:
    """One unit in this process."""
    try:
        return units(given.sizes)[name](given)
    except Exception as error:  # whatever it is, the suite goes on
        return failed(type(error).__name__, str(error))


def failed(kind: str, message: str) -> dict[str, Any]:
    """What the record says of a unit that did not end."""
    return {"error": {"type": kind, "message": message[-4000:]}, "goals": []}


def isolated(work: Callable[[], dict[str, Any]], limit: float = LIMIT) -> dict[str, Any]:
    """Return what ``work`` gives, which can be pickled, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "unit.json", Path(folder) / "errors"
        process = FORKED.Process(target=_answer, args=(work, out, errors))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            return failed("TimeoutExpired", f"no answer within {limit:,.0f} s")
        if process.exitcode or not out.exists():
            return failed(f"exit code {process.exitcode}", errors.read_text(errors="replace"))
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _answer(work: Callable[[], dict[str, Any]], out: Path, errors: Path) -> None:
    """Write what ``work`` gives; what it, or a library below it, says on stderr goes to ``errors``."""
    with errors.open("w") as said:
        os.dup2(said.fileno(), 2)
        write(work(), out)


def suite(names: list[str], measure: Measure, record: dict[str, Any], path: Path) -> None:
    """Run what the record does not have, and write it after each."""
    for name in names:
        if name not in record["units"]:
            start = time.perf_counter()
            found = measure(name)
            record["units"][name] = {"seconds": round(time.perf_counter() - start, 1), **found}
        record["summary"] = summary(record["units"])
        write(record, path)
        for line in lines(name, record["units"][name]):
            print(line, flush=True)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """How many goals are met, which are not, and which units failed."""
    goals = [goal for each in found.values() for goal in each["goals"]]
    return {
        "met": sum(goal["met"] for goal in goals),
        "not_met": [goal["what"] for goal in goals if not goal["met"]],
        "failed": [name for name, each in found.items() if "error" in each],
    }


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """A unit in words."""
    if "error" in found:
        last = (found["error"]["message"].strip().splitlines() or [""])[-1]
        return [f"{name}: FAILED, {found['error']['type']}: {last}"]
    said = [
        f"{name}: {each['what']}: {each['value']:.3g}, goal {each['bound']}: {'met' if each['met'] else 'NOT MET'}"
        for each in found["goals"]
    ]
    return said or [f"{name}: {found.get('note', 'no goal')}"]


def goals(record: dict[str, Any]) -> str:
    """Return the goals of a record in a table, but those of tests and at equal bytes."""
    every = [goal for each in record["units"].values() for goal in each["goals"]]
    told = [goal for goal in every if not re.search("that|same bytes", goal["what"])]
    rows = [[each["what"], f"{each['value']:.3g}", each["bound"], "met" if each["met"] else "missed"] for each in told]
    return markdown(["what", "measured", "goal", ""], rows)


def header(device: str, quick: bool) -> dict[str, Any]:
    """What ran, and where."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    return {
        "device": device, "label": LABELS[quick], "hardware": hardware(), "cuda": torch.version.cuda,
        "versions": {name: environment()[name] for name in ("torch", "triton", "transformers", "lightning", "peft")},
        "commit": commit.stdout.strip() or None, "sources": sources(),
        "kernel": str(choose_kernel(device.split(":", maxsplit=1)[0])),
    }  # fmt: skip


def sources() -> str:
    """A hash of the package and of these programs."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "subtoken_train").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def ended(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Units of an earlier record that stand: of the same sources, device and sizes, without an error."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    same = all(earlier[key] == now[key] for key in ("sources", "device", "label", "kernel", "hardware"))
    return {name: found for name, found in earlier["units"].items() if "error" not in found} if same else {}


def refusal(device: str, quick: bool) -> str | None:
    """Why it cannot run, in words."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        return "no CUDA device here; run it on a machine with a GPU, or try it out with --device cpu --quick"
    if not device.startswith("cuda") and not quick:
        return f"--device {device} runs tiny shapes alone; add --quick"
    try:
        choose_kernel(device.split(":", maxsplit=1)[0])
    except ValueError as error:
        return str(error)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write. Exit code: 1 where a unit failed or, at full sizes, missed a goal; 2 where it cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/speed/gpu-suite.json; quick: below runs")
    parser.add_argument("--units", nargs="+", default=[""], metavar="START", help="those whose names start so")
    parser.add_argument("--list", action="store_true", help="print the units' names in their order, and run nothing")
    args = parser.parse_args(arguments)
    known = units(QUICK if args.quick else FULL)
    names = list(dict.fromkeys(name for start in args.units for name in known if name.startswith(start)))
    if args.list:
        print(*names, sep="\n")
        return 0
    if refused := refusal(args.device, args.quick):
        print(f"gpu_suite: {refused}", file=sys.stderr)
        return 2
    path = args.out or ROOT / ("runs/gpu-suite-quick.json" if args.quick else "benchmarks/results/speed/gpu-suite.json")
    record = header(args.device, args.quick)
    record["units"] = ended(path, record)
    if path.exists() and not record["units"]:
        print(f"{path} is of other sources, sizes or hardware (its threads too): it is written anew")
    print(f"{record['hardware']['gpu'] or record['hardware']['cpu']}: {record['label']}; kernel: {record['kernel']}")
    suite(names, lambda name: isolated(partial(unit_of, name, args.device, args.quick)), record, path)
    found = record["summary"]
    print(f"{found['met']} goals met, {len(found['not_met'])} not, {len(found['failed'])} units failed: {path}")
    return int(bool(found["failed"] or (found["not_met"] and not args.quick)))


if __name__ == "__main__":
    sys.exit(main())
