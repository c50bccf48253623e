"""Processes in turns, and what measures beside kvpress with them: pairing, protocol, record. No test is about speed."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import peer_side, peers
from benchmarks.workers import Worker, in_turns

RECORD = Path(__file__).resolve().parents[1] / "benchmarks/results/speed/peers-cpu-float32.json"
FAKE = """
import json, os, sys
name, log = sys.argv[1:]
print(json.dumps({"fake": name}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    with open(log, "a") as file:
        print(name, asked["do"], asked["method"], file=file)
    if asked["do"] == "end":
        sys.exit(3)
    if asked["method"] == "broken":
        answer = {"error": "ValueError: no such press"}
    elif asked["do"] == "fill":
        answer = {"seconds": 1.0 + (name == "kvpress") + (asked["method"] != "none"), "bytes": 4}
    elif asked["do"] == "decode":
        answer = 0.001 if name == "ours" else 0.002
    else:
        answer = [1.0, 2.0 if name == "ours" else 2.5]
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def sides(tmp_path):
    """Two workers without a library, and the log of what they were asked."""
    log = tmp_path / "log"
    workers = {name: Worker(sys.executable, "-c", FAKE, name, str(log)) for name in ("ours", "kvpress")}
    yield workers, log
    for worker in workers.values():
        worker.close()


def test_sides_take_turns_and_the_order_alternates(sides):
    workers, log = sides
    assert {side: worker.versions for side, worker in workers.items()} == {n: {"fake": n} for n in ("ours", "kvpress")}
    able = {"none": ["ours", "kvpress"], "kvcompose": ["ours"]}
    answers, last = peers.rounds(workers, able, 2, 1, 1, do="fill")
    assert [line.split()[::2] for line in log.read_text().splitlines()] == [
        *(["ours", "none"], ["kvpress", "none"], ["ours", "kvcompose"]),
        *(["ours", "kvcompose"], ["kvpress", "none"], ["ours", "none"]),
        *(["ours", "none"], ["kvpress", "none"]),  # the side that is alone has had its one round
    ]
    assert {name: {side: len(each) for side, each in of.items()} for name, of in answers.items()} == {
        "none": {"ours": 2, "kvpress": 2},
        "kvcompose": {"ours": 1},
    }
    assert last["none"]["kvpress"] == {"seconds": 2.0, "bytes": 4}
    assert in_turns(["a", "b"], 0) == ["a", "b"]
    assert in_turns(["a", "b"], 1) == ["b", "a"]


def test_an_error_is_an_answer_and_an_end_is_told(sides):
    workers, _ = sides
    with pytest.raises(RuntimeError, match="ValueError: no such press"):
        workers["ours"].ask(do="fill", method="broken")
    assert workers["ours"].ask(do="decode", method="none", steps=1) == 0.001  # it lives
    with pytest.raises(RuntimeError, match="exit code 3"):
        workers["ours"].ask(do="end", method="none")
    with pytest.raises(RuntimeError, match="exit code 3"):
        workers["ours"].ask(do="end", method="none")


def test_rows_pair_the_rounds_and_name_what_one_side_cannot(sides):
    workers, _ = sides
    rows = {row["method"]: row for row in peers.measure(workers, 32768, 2, peers.able(32768, 2**30))}
    assert list(rows) == list(peers.METHODS)
    snapkv, alone = rows["snapkv"], rows["kvcompose"]
    assert snapkv["pass_ratio"] == (2 / 3,) * 3
    assert snapkv["step_ratio"] == (0.5,) * 3
    assert snapkv["adds_seconds"] == {"ours": (1.0,) * 3, "kvpress": (1.0,) * 3}
    assert snapkv["logits_apart"] == 0.5
    assert rows["none"]["adds_seconds"]["ours"] == (0.0,) * 3
    assert set(alone["bytes"]) == {"ours"}
    assert alone["pass_ratio"] is alone["step_ratio"] is alone["logits_apart"] is None
    lines = peers.table({"rows": list(rows.values())}).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| 0.50 [0.50, 0.50] | 0.67 [0.67, 0.67] |" in lines[3]


def test_what_is_measured_anew_takes_its_place():
    def row(length, method, run=0):
        return {"length": length, "method": method, "run": run}

    rows = peers.merged([row(8192, "none"), row(2048, "think"), row(2048, "none")], [row(2048, "think", 1)])
    assert rows == [row(2048, "none"), row(2048, "think", 1), row(8192, "none")]


def test_our_side_answers_as_the_protocol_says(tmp_path, monkeypatch):
    """Every method: a step leaves the cache as it was, half of the entries or key channels are not held."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    monkeypatch.setattr(peer_side, "SHAPE", {**peer_side.SHAPE, **small})
    peer_side.random_weights(256, tmp_path)
    ours = import_module("benchmarks.peers_ours")
    answers = peer_side.Answers(ours.Ours(peer_side.load(256, tmp_path)), 256)
    dense = 2 * 2 * 2 * 16 * 256 * 4
    held = {}
    with torch.no_grad():
        for method in ours.COMPRESSIONS:
            held[method] = answers.fill(method)["bytes"]
            before = answers.logits(method)
            assert answers.decode(method, 3) >= 0
            assert answers.logits(method) == before
    assert set(held) == set(peers.METHODS)
    assert held["none"] == dense
    assert held["snapkv"] == held["kvcompose"] == dense // 2
    assert dense // 2 <= held["kvcompose_heads"] < 0.51 * dense
    assert 0.75 * dense < held["think"] < 0.8 * dense  # the last 32 of 256 keys stay whole


def test_what_was_recorded():
    record = json.loads(RECORD.read_text())
    assert record["versions"]["kvpress"] == {"kvpress": "0.5.4", "transformers": "5.2.0", "torch": "2.13.0+cpu"}
    assert record["hardware"]["threads"] == 1
    rows = {(row["length"], row["method"]): row for row in record["rows"]}
    alone = {(32768, name) for name in ("kvcompose", "kvcompose_heads")}  # eager attention does not fit
    alone |= {(length, "kvzip") for length in peers.ROUNDS if length > 2048}  # which was timed later than the others
    assert set(rows) == {(length, method) for length in peers.ROUNDS for method in peers.METHODS} - alone
    for (_, method), row in rows.items():
        dense = row["plain_bytes"]
        if method in ("none", "snapkv"):  # the same entries, to rounding
            assert row["bytes"]["ours"] == row["bytes"]["kvpress"]
            assert row["logits_apart"] < 1e-3
        if method in ("kvcompose_heads", "think"):  # there nothing gets smaller
            assert row["bytes"]["ours"] < 0.8 * dense
            assert row["bytes"].get("kvpress", dense) >= dense
