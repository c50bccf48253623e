"""Records of finished runs: one table a folder, a row a run, every score in the order of the questions.

As rows of a Parquet table, what repeats in runs is stored once. Reading gives back what was written, to the digit.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

TABLE = "runs.parquet"
"""Name of the table in its folder."""


def read_runs(folder: Path, names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Read the runs of a folder, sorted by arm and seed; none where it has no table.

    Args:
        folder: of the table.
        names: read only these of a run; None: everything.
    """
    path = folder / TABLE
    if not path.exists():
        return []
    columns = None if names is None else [name for name in pq.read_schema(path).names if name in names]
    return [_record(row) for row in pq.read_table(path, columns=columns).to_pylist()]


def has_run(folder: Path, arm: str, seed: int) -> bool:
    """Say whether a folder's table holds the run of an arm and a seed."""
    return {"arm": arm, "seed": seed} in read_runs(folder, ("arm", "seed"))


def add_run(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a run to a folder's table, in the place of one with its arm and seed; several processes may do so at once.

    Args:
        folder: made where it is not there.
        record: what JSON can hold, ``arm`` and ``seed`` among it; of mappings only ``measures``, from names to figures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TABLE
    with FileLock(folder / ".runs.lock"):
        key = (record["arm"], record["seed"])
        others = [run for run in read_runs(folder) if (run["arm"], run["seed"]) != key]
        rows = [_row(run) for run in sorted([*others, record], key=lambda run: (run["arm"], run["seed"]))]
        names = dict.fromkeys(name for row in rows for name in row)
        staged = path.with_suffix(".staged")
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(table, staged, compression="brotli", compression_level=11, data_page_size=1 << 26)
        os.replace(staged, path)


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    measures = record.get("measures")
    pairs = None if measures is None else [{"name": name, "values": values} for name, values in measures.items()]
    return {**record, **({} if pairs is None else {"measures": pairs})}


def _record(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if value is not None}
    if "measures" in kept:
        kept["measures"] = {pair["name"]: pair["values"] for pair in kept["measures"]}
    return kept
