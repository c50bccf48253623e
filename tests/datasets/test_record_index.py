"""A file of many records is read from a mapped table: no process holds what it has read."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import datasets
import pytest

from subtoken_train.datasets import record_index
from subtoken_train.datasets.records import InstructionRecords


def own_memory():
    """Return this process's memory in bytes, without pages of files, which the system takes back when it needs them."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    return next(1024 * int(words[1]) for words in lines if words[0] == "Anonymous:")


def grown(records, connection):
    """Bytes that a process takes to read every record."""
    records[0]
    before = own_memory()
    turns = sum(len(records[index].turns) for index in range(len(records)))
    connection.send((turns, own_memory() - before))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc")
def test_a_worker_does_not_hold_what_it_has_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(record_index, "SMALL_FILE", 0)
    path = tmp_path / "records.json"
    asked, told = ({"from": who, "value": "a street, 東京 or a sign. " * 20} for who in ("human", "gpt"))
    path.write_text(json.dumps([{"id": place, "conversations": [asked, told]} for place in range(8000)]))
    assert path.stat().st_size > 8 * 2**20
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=grown, args=(InstructionRecords(path), sender))
    worker.start()
    assert receiver.poll(60)
    turns, size = receiver.recv()
    worker.join()
    assert turns == 8000
    assert size < 3 * 2**20
