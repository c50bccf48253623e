"""Small evaluation runs on the shipped embedded models: grids, their records, a run in a process of its own."""

import multiprocessing
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path

from subtoken_train.evaluation.results import SampleRecord, read_samples
from subtoken_train.evaluation.runner.cell import Processes
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, Grid, TaskSpec

ADAPTERS = "checkpoints/adapters"
ROUTED = ArmSpec(adapter=f"{ADAPTERS}/tiny_fastv25_s16k4")
ANCHOR = ArmSpec(adapter=f"{ADAPTERS}/tiny_fastv25_s16k4_anchor")
WHOLE = ArmSpec(adapter=f"{ADAPTERS}/tiny_lora_only")
TIMES = ("prefill_seconds", "decode_seconds")  # the fields in which two runs of the same arm differ


def scenes_grid(scenes: Path, out: Path, *arms: ArmSpec, tasks: tuple[str, ...] = ("scenes_gqa",), **settings) -> Grid:
    specs = tuple(TaskSpec(name, source=str(scenes)) for name in tasks)
    return Grid(**{"arms": arms, "tasks": specs, "out": out, "batch_size": 4, "anchors": "none", **settings})


def records(folder: Path) -> dict[str, SampleRecord]:
    return {key: replace(record, **dict.fromkeys(TIMES, 0.0)) for key, record in read_samples(folder).items()}


def answers(folder: Path) -> dict[str, dict[str, object]]:
    """The records of one cell without what a batch shares: times, its size, and what finds the rows of its storage."""
    found = {}
    for key, record in records(folder).items():
        stored = record.region_bytes - record.index_bytes
        found[key] = {**asdict(record), "batch_size": 0, "kv_bytes": 0, "index_bytes": 0, "region_bytes": stored}
    return found


def start(grid: Grid, rank: int = 0, count: int = 1, port: int = 0) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_run, args=(grid, rank, count, port), daemon=True)
    process.start()
    return process


def _run(grid: Grid, rank: int, count: int, port: int) -> None:
    environment = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()})
    with Processes.from_environment() as processes:
        run_grid(grid, processes=processes)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


MEASURED = {
    "kv_bytes": 10, "dense_kv_bytes": 20, "region_bytes": 5, "region_dense_bytes": 10, "index_bytes": 0,
    "entries_before": 40, "entries_after": 10, "values_after": 5.0, "new_tokens": 1,
    "batch_size": 1, "prefill_seconds": 0.0, "decode_seconds": 0.0,
}  # fmt: skip
