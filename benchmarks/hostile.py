"""Thousands of hostile inputs, drawn by seed, and what came of them: the campaign of ``tests/hostile``, at length.

Two processes, each with one import of the libraries, run the cases one after another; a process that a case holds in C
code or kills is replaced, and the case counts as a hang. The record goes to ``results/hostile.json``.

  python benchmarks/hostile.py --cases 12000 --seed 1
  python benchmarks/hostile.py --only recipes:1000100,adapters:1000060        one case or some, told at length
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.pairs import hardware
from tests.hostile.campaign import counts, plan, run_cases
from tests.hostile.case import Expect, Outcome, Verdict
from tests.hostile.pool import make_pool

RESULT = Path(__file__).resolve().parent / "results/hostile.json"
PATIENCE = 180.0  # wall seconds that the parent waits for one case; the case's own watch is far shorter
Job = tuple[str, int]


def work(jobs: Sequence[Job], folder: Path, pool: Path, send: Connection) -> None:
    """Run cases in this process and send each outcome, and the name of each case before it starts."""
    import torch

    torch.set_num_threads(1)
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        for outcome in run_cases(_told(jobs, send), folder, pool):
            send.send(outcome)
    send.close()


def _told(jobs: Sequence[Job], send: Connection) -> Iterator[Job]:
    for name, seed in jobs:
        send.send(f"{name}:{seed}")
        yield name, seed


class Worker:
    """A process and what is left for it; it is started again behind a case that it did not come back from."""

    def __init__(self, jobs: Sequence[Job], folder: Path, pool: Path) -> None:
        self.jobs, self.folder, self.pool = list(jobs), folder, pool
        self.restarts, self.open = 0, True
        self.start()

    def start(self) -> None:
        """A process for the cases that are left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.receive, send = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("spawn").Process(
            target=work, args=(self.jobs, self.folder, self.pool, send)
        )
        self.process.start()
        send.close()
        self.case, self.since = "", time.monotonic()

    def take(self) -> Outcome | None:
        """The next outcome, if there is one."""
        try:
            message = self.receive.recv()
        except EOFError:
            self.process.join()
            self.open = bool(self.jobs)
            return self.lost("the process died") if self.jobs else None
        self.since = time.monotonic()
        if isinstance(message, str):
            self.case = message
            return None
        if message.name == self.case:
            self.jobs.pop(0)
            self.case = ""
        assert isinstance(message, Outcome)
        return message

    def lost(self, why: str) -> Outcome:
        """The case that it did not come back from; goes on behind it."""
        self.process.kill()
        self.process.join()
        name, seed = self.jobs.pop(0)
        waited = time.monotonic() - self.since
        self.restarts += 1
        self.open = bool(self.jobs)
        if self.jobs:
            self.start()
        return Outcome(f"{name}:{seed}", "", Verdict.HANG, why, Expect.REFUSED, None, waited)


def campaign(jobs: Sequence[Job], processes: int, folder: Path, pool: Path) -> tuple[list[Outcome], int]:
    """All outcomes, and how often a process had to be replaced."""
    workers = [Worker(jobs[rank::processes], folder / f"worker-{rank}", pool) for rank in range(processes)]
    outcomes: list[Outcome] = []
    clock = time.monotonic()
    while busy := {worker.receive: worker for worker in workers if worker.open}:
        ready = [busy[each] for each in wait(list(busy), timeout=5.0) if isinstance(each, Connection)]
        found = [worker.take() for worker in ready]
        late = [each for each in busy.values() if time.monotonic() - each.since > PATIENCE]
        found += [worker.lost(f"did not come back within {PATIENCE:g} s") for worker in late]
        for outcome in filter(None, found):
            outcomes.append(outcome)
            if outcome.verdict is not Verdict.CLEAN:
                print(f"{outcome.name} {outcome.verdict}: {outcome.what}\n    {outcome.detail[-600:]}", flush=True)
            if len(outcomes) % 500 == 0:
                print(f"{len(outcomes):,} of {len(jobs):,} in {time.monotonic() - clock:.0f} s", flush=True)
    for worker in workers:
        worker.process.join()
    return outcomes, sum(worker.restarts for worker in workers)


def record(outcomes: Sequence[Outcome], seed: int, processes: int, seconds: float, restarts: int) -> dict[str, Any]:
    """What the campaign's file holds."""
    from subtoken_train import __version__

    classes = sorted({outcome.name.partition(":")[0] for outcome in outcomes})
    by_class = {name: [each for each in outcomes if each.name.startswith(f"{name}:")] for name in classes}
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    return {
        "version": __version__, "hardware": hardware(), "seed": seed, "processes": processes, "seconds": round(seconds),
        "restarts": restarts, "slowest": {"case": slowest.name, "seconds": round(slowest.seconds, 1)},
        "total": counts(outcomes),
        "classes": {
            name: {**counts(group), "seconds": round(sum(each.seconds for each in group))}
            for name, group in by_class.items()
        },
        "not_clean": [
            {key: value for key, value in asdict(each).items() if key in ("name", "what", "verdict", "detail")}
            for each in outcomes
            if each.verdict is not Verdict.CLEAN
        ],
    }  # fmt: skip


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--classes", default="", help="comma-separated; default: all")
    parser.add_argument("--only", default="", metavar="CLASS:SEED,...", help="these cases alone; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    only: list[Job] = [(name.partition(":")[0], int(name.partition(":")[2])) for name in args.only.split(",") if name]
    jobs = only or plan(args.seed, args.cases, tuple(filter(None, args.classes.split(","))))
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        pool = make_pool(Path(folder) / "pool")
        clock = time.monotonic()
        outcomes, restarts = campaign(jobs, min(args.processes, len(jobs)), Path(folder), pool)
        seconds = time.monotonic() - clock
    if only:
        print(*(f"{each.name}: {each.what}: {each.verdict}\n{each.detail}" for each in outcomes), sep="\n")
        return 0
    content = record(outcomes, args.seed, args.processes, seconds, restarts)
    print(f"{json.dumps(content['total'])} in {seconds:.0f} s")
    text = re.sub(rf"{re.escape(str(folder))}/(worker-\d+/case/work/)?", "", json.dumps(content, indent=1))
    args.out.write_text(text + "\n", encoding="utf-8")
    return int(content["total"]["clean"] != len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
