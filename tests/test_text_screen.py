"""benchmarks/text_screen.py: its records are whole and make the page's table."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.text_screen import ARMS, SEEDS, WINDOWS, bits_a_byte, read_runs, table
from tests.support import places


def test_records_are_whole_and_make_the_table():
    runs = read_runs()
    assert list(runs) == [trial.name for trial in ARMS]
    asked = {(run["windows_sha256"], tuple(run["text_bytes"])) for own in runs.values() for run in own}
    assert len(asked) == 1
    for name, own in runs.items():
        assert [(run["arm"], run["seed"]) for run in own] == [(name, seed) for seed in SEEDS]
        assert all(len(run["nats"]) == WINDOWS for run in own)
    assert table(runs) in (places.ROOT / "benchmarks/README.md").read_text()


def test_compressed_contexts_hold_no_more_than_the_peer():
    shares = {name: max(run["kv"] for run in own) for name, own in read_runs().items()}
    assert shares.pop("lora_only") == 1
    peer = shares["lora_only-compactor-0.21875"]
    assert max(shares.values()) <= peer * 1.0025  # a share of a window's tokens is a whole number of them


def test_bits_are_of_the_scored_texts_bytes():
    runs = [{"nats": [-2.0 * math.log(2), -3.0 * math.log(2)], "text_bytes": [1, 6]}]
    assert np.allclose(bits_a_byte(runs), [[2.0, 0.5]])
