"""The memory of workers that read a large file, small; the page shows the committed record."""

from __future__ import annotations

import importlib
import json
import multiprocessing
from pathlib import Path

import datasets
import pytest

from subtoken_train.datasets import record_index
from subtoken_train.datasets.records import InstructionRecords
from tests.support.places import ROOT, shown

RECORD = ROOT / "benchmarks" / "results" / "data" / "index.json"
data_index = importlib.import_module("benchmarks.data_index")


def grown(records, connection):
    """Memory (MiB) that a process takes to read every record."""
    records[0]
    before = total(data_index.memory())
    turns = sum(len(records[index].turns) for index in range(len(records)))
    connection.send((turns, total(data_index.memory()) - before))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc")
def test_a_worker_does_not_hold_what_it_has_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(record_index, "SMALL_FILE", 0)
    path = tmp_path / "records.json"
    data_index.make_records(path, 8000)
    assert path.stat().st_size > 8 * 2**20
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=grown, args=(InstructionRecords(path), sender))
    worker.start()
    assert receiver.poll(60)
    turns, mebibytes = receiver.recv()
    worker.join()
    assert turns > 8000
    assert mebibytes < 3


def test_the_made_up_records_have_the_parts_of_mix665k(tmp_path):
    data_index.make_records(tmp_path / "records.json", 2000)
    rows = json.loads((tmp_path / "records.json").read_text())
    folders = [row.get("image", "/").rpartition("/")[0] for row in rows]
    whole = sum(records for records, *_ in data_index.MIX.values())
    assert whole == 665_298
    for folder, (records, *_) in data_index.MIX.items():
        assert abs(folders.count(folder) / 2000 - records / whole) < 0.05
    assert {type(row["id"]) for row in rows} == {int, str}


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


def test_the_page_shows_the_record(record):
    assert shown(ROOT / "data" / "README.md", "index") == data_index.table(record)


def test_no_process_held_the_set(record):
    assert record["records"] == 665_298
    rows = record["rows"]
    whole = total(rows["parse whole"]["after_mib"]) - total(rows["parse whole"]["before_mib"])
    assert total(rows["iterate"]["after_mib"]) - total(rows["iterate few"]["after_mib"]) < 0.02 * whole
    for all_records, few in zip(rows["iterate"]["workers_mib"], rows["iterate few"]["workers_mib"], strict=True):
        assert total(all_records) - total(few) < 0.02 * whole


def total(memory):
    return memory["private"] + memory["shared"]
