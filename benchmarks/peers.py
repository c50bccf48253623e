"""Bytes held, decoding and compression of whole caches beside kvpress's own presses, in paired rounds.

    python -m venv /tmp/kvpress                                          # an environment apart from ours
    /tmp/kvpress/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    /tmp/kvpress/bin/pip install kvpress==0.5.4 transformers==5.2.0
    OMP_NUM_THREADS=1 python -m benchmarks.peers --kvpress /tmp/kvpress/bin/python

A random Llama (D = 512, 2 layers, 4 query heads of 128 on 2 key-value heads, fp32) reads the same context on both sides
with the same weights; half of the entries stay (ThinK: half of the key channels). A side is a process with one thread
(``peers_ours.py``, ``peers_kvpress.py``); both wait for each other, a round is one turn of either, and the order
alternates. Seconds are the processor's. Compared are

* *bytes held*: all tensors of the compressed cache: ours with its index, kvpress's with the places that it masks;
* *step*: one decoded token, mean over eight, at equal kept entries;
* *pass*: the context's whole pass, compression included; *adds* is that less the plain pass of the same round;
* *logits*: the largest difference of the first token's, which says whether both compress to the same thing.

ThinK in kvpress zeroes channels, head-wise KVCompose and KVzip mask entries: none makes its cache smaller, so equal
bytes cannot be had there. kvpress's KVCompose needs eager attention, N x 2N numbers a head: where that is more than
``--memory`` it is left out, and our side is measured alone. A length that the record has is not measured again unless
it is named in ``--lengths``.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import put
from benchmarks.pairs import cell, hardware, markdown, middle, ratio, write
from benchmarks.peer_side import KEPT, SHAPE, random_weights
from benchmarks.workers import ROOT, Worker, in_turns

RECORD, PAGE = ROOT / "benchmarks/results/speed/peers-cpu-float32.json", ROOT / "docs/speed.md"
ROUNDS = {2048: 15, 8192: 5, 32768: 1}
"""Tokens of the context -> rounds of whole passes; a method that one side alone runs gets one."""
DECODE_ROUNDS, STEPS, WARMUP = 20, 8, 1
PLAIN = "none"
METHODS = {
    PLAIN: "nothing", "snapkv": "SnapKV", "kvcompose": "KVCompose", "kvcompose_heads": "KVCompose, head-wise",
    "kvzip": "KVzip", "think": "ThinK",
}  # fmt: skip
Rounds = dict[str, dict[str, list[float]]]
"""Method -> side -> seconds, round by round; a side that cannot is not there."""


def eager_bytes(length: int) -> int:
    """What eager attention of the press's second pass holds at once: logits, and their softmax."""
    return 2 * 4 * SHAPE["num_attention_heads"] * length * 2 * length


def able(length: int, most: int, methods: Sequence[str] = tuple(METHODS)) -> dict[str, list[str]]:
    """Method -> the sides that run it at this length; the plain pass is always there to be compared with."""
    both, alone = ["ours", "kvpress"], ["ours"]
    chosen = [name for name in METHODS if name in (PLAIN, *methods)]
    return {name: alone if "kvcompose" in name and eager_bytes(length) > most else both for name in chosen}


def rounds(
    workers: Mapping[str, Worker], sides: dict[str, list[str]], count: int, alone: int, warmup: int, **message: Any
) -> tuple[Rounds, dict[str, Any]]:
    """Ask each side for each method, ``count`` rounds (``alone`` for a method of one side): all answers, the last."""
    answers: dict[str, Any] = {name: {side: [] for side in able_sides} for name, able_sides in sides.items()}
    for turn in range(warmup + count):
        for name in in_turns(sides, turn):
            if len(sides[name]) == 1 and turn >= warmup + alone:
                continue
            for side in in_turns(sides[name], turn):
                answers[name][side].append(workers[side].ask(method=name, **message))
    last = {name: {side: each[-1] for side, each in found.items()} for name, found in answers.items()}
    return {name: {side: each[warmup:] for side, each in found.items()} for name, found in answers.items()}, last


def measure(
    workers: Mapping[str, Worker], length: int, count: int, sides: dict[str, list[str]]
) -> list[dict[str, Any]]:
    """All methods at one length: a row each."""
    load = [os.getloadavg()[0]]
    filled, last = rounds(workers, sides, count, 1, WARMUP if length == min(ROUNDS) else 0, do="fill")
    passes = {
        name: {side: [each["seconds"] for each in found] for side, found in of.items()} for name, of in filled.items()
    }
    steps, _ = rounds(workers, sides, DECODE_ROUNDS, DECODE_ROUNDS, WARMUP, do="decode", steps=STEPS)
    load.append(os.getloadavg()[0])
    rows = []
    for name, of in sides.items():
        logits = [np.array(workers[side].ask(do="logits", method=name)) for side in of]
        rows.append(
            {
                "method": name,
                "length": length,
                "rounds": count if len(of) > 1 else 1,
                "decode_rounds": DECODE_ROUNDS,
                "load": load,
                "bytes": {side: last[name][side]["bytes"] for side in of},
                "plain_bytes": last[PLAIN]["kvpress"]["bytes"],
                "logits_apart": float(np.abs(logits[0] - logits[-1]).max()) if len(of) > 1 else None,
                **figures(passes[name], passes[PLAIN], steps[name]),
            }
        )
    return rows


def figures(
    passes: dict[str, list[float]], plain: dict[str, list[float]], steps: dict[str, list[float]]
) -> dict[str, Any]:
    """Medians, ratios of paired rounds, and what compression adds to the plain pass of its round."""
    both = len(passes) > 1
    return {
        "pass_seconds": {side: float(np.median(each)) for side, each in passes.items()},
        "pass_ratio": ratio(passes, "ours", "kvpress") if both else None,
        "adds_seconds": {
            side: middle(np.array(each) - np.array(plain[side][: len(each)])) for side, each in passes.items()
        },
        "step_ms": {side: 1000 * float(np.median(each)) for side, each in steps.items()},
        "step_ratio": ratio(steps, "ours", "kvpress") if both else None,
    }


def merged(rows: list[dict[str, Any]], made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Earlier rows with those that were made anew in their place, by length and method."""
    known = {(row["length"], row["method"]): row for row in [*rows, *made]}
    return [known[key] for key in sorted(known, key=lambda key: (key[0], list(METHODS).index(key[1])))]


def table(record: dict[str, Any]) -> str:
    """A row per method, of the longest context that it was asked."""
    head = "tokens|method|held, ours|held, kvpress|step, ours / kvpress|pass, ours / kvpress|logits"
    rows = []
    for row in {row["method"]: row for row in record["rows"]}.values():
        cells = [f"{row['length']:,}", METHODS[row["method"]]]
        for side in ("ours", "kvpress"):
            held = row["bytes"].get(side)
            cells.append("" if held is None else f"{held / 2**20:.1f} MiB ({held / row['plain_bytes']:.1%})")
        cells.append("" if row["step_ratio"] is None else cell(tuple(row["step_ratio"])))
        median, once = row["pass_ratio"], row["rounds"] == 1  # one round has no interval
        cells.append("" if median is None else f"{median[0]:.2f}" if once else cell(tuple(median)))
        apart = row["logits_apart"]
        rows.append([*cells, "" if apart is None else f"{apart:.0e}"])
    return markdown(head.split("|"), rows)


def main() -> None:
    """Measure length by length, write after each, and show the table on the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvpress", required=True, help="the python of an environment with kvpress 0.5.4")
    parser.add_argument("--lengths", nargs="+", type=int, help="default: those that the record does not have")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, help="default: by length")
    parser.add_argument("--memory", type=float, default=6.0, help="GiB that eager attention may hold")
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for length in args.lengths or [length for length in ROUNDS if length not in {row["length"] for row in rows}]:
        with tempfile.TemporaryDirectory() as folder:
            random_weights(length, Path(folder))
            words = (str(length), folder)
            workers = {
                "ours": Worker(sys.executable, "-m", "benchmarks.peers_ours", *words),
                "kvpress": Worker(args.kvpress, "-m", "benchmarks.peers_kvpress", *words),
            }
            count = args.rounds or ROUNDS.get(length, min(ROUNDS.values()))
            made = measure(workers, length, count, able(length, int(args.memory * 2**30), args.methods))
            rows = merged(rows, [row for row in made if row["method"] in args.methods])
            versions = {side: worker.versions for side, worker in workers.items()}
            for worker in workers.values():
                worker.close()
        record = {
            "hardware": hardware(),
            "note": "other work ran on the machine; seconds are the processor's; load: the machine's, before and after",
            "versions": versions, "model": SHAPE, "kept": KEPT, "steps": STEPS, "rows": rows,
        }  # fmt: skip
        write(record, args.out)
        print(table(record), flush=True)
    if args.out == RECORD:
        put(PAGE, "peers", table(json.loads(RECORD.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
