"""Appendix C.1's peak memory: its arms, their bytes to the entry, the printed figures, and what it is refused for."""

from __future__ import annotations

import json

import pytest

from subtoken_train.benchmarking import paper_protocols
from subtoken_train.benchmarking.comparison import Subject
from subtoken_train.benchmarking.paper_protocols import (
    PEAK_GB,
    PREFIX_TOKENS,
    SUFFIX_TOKENS,
    measure_memory,
    memory_prompt,
    peak_lines,
)
from subtoken_train.cli.main import main
from subtoken_train.inference.compression import Compression
from subtoken_train.ledger.kv_budget import geometry
from subtoken_train.reducers import build_reducer
from tests.support.text_families import text_family

LLAMA = "meta-llama/Llama-2-7b-hf"
ARMS = ["no compression", "quest 25%", "quest 25% + S16K12", "quest 12.5%", "quest 12.5% + S16K12"]


def test_the_printed_peaks_lie_apart_by_the_dropped_tokens():
    """In GB of 10^9 bytes, to the printed digits: 2,048 tokens of LLaMA-2-7B less those that Quest keeps."""
    token = geometry("llama-2-7b").token_bytes / 1e9
    for name, keep_ratio in (("quest 25%", 0.25), ("quest 12.5%", 0.125)):
        dropped = PREFIX_TOKENS - build_reducer("quest", keep_ratio).kept_tokens(PREFIX_TOKENS)
        apart = PEAK_GB[LLAMA]["no compression"] - PEAK_GB[LLAMA][name]
        assert apart == pytest.approx(dropped * token, abs=1e-3)


def test_the_arms_and_their_bytes(monkeypatch):
    """On a random Llama of two layers, with a prefix of 512 tokens: the cache is what the budget says."""
    monkeypatch.setattr(paper_protocols, "PREFIX_TOKENS", 512)
    family = text_family(layers=2)
    row = measure_memory(Subject(family, build_reducer("none"), None, Compression()))
    assert list(row["arms"]) == ARMS
    assert row["prompt"]["length"] == 512 + SUFFIX_TOKENS
    whole = 2 * 2 * 16 * 4  # bytes of an entry: keys and values of two heads
    for name, arm in row["arms"].items():
        kept = 512 if name == "no compression" else 128 if "25%" in name else 64
        share = 7 / 8 if "S16K12" in name else 1
        assert arm["entries"] == kept + SUFFIX_TOKENS
        assert arm["cache"]["payload"] == 2 * whole * (kept * share + SUFFIX_TOKENS)
        assert arm["peak_bytes"] > arm["cache"]["payload"]
    lines = peak_lines(row, LLAMA)
    assert len(lines) == 1 + len(ARMS)
    assert lines[1].endswith("14.791")
    assert lines[3].split()[-1] != "13.985"  # no figure of a routed arm is printed


def test_ctrl_c_keeps_the_arms_that_were_run(monkeypatch):
    monkeypatch.setattr(paper_protocols, "PREFIX_TOKENS", 128)
    shown = []

    def stop(done, total):
        shown.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    row = measure_memory(Subject(text_family(layers=2), build_reducer("none"), None, Compression()), stop)
    assert list(row["arms"]) == ARMS[:2]
    assert row["interrupted"]
    assert shown == [(1, 5), (2, 5)]
    assert len(peak_lines(row, LLAMA)) == 3


def test_a_model_of_images_is_refused(tiny_family):
    with pytest.raises(ValueError, match=r"--peak-memory is about a language model's prefix.*--table8 is about those"):
        memory_prompt(tiny_family)


@pytest.mark.slow
def test_the_command_says_what_is_scaled(tmp_path, capsys):
    out = tmp_path / "memory.json"
    words = ["benchmark", "--model", LLAMA, "--random", "--layers", "1", "--peak-memory", "--device", "cpu"]
    assert main([*words, "--out", str(out)]) == 0
    record, said = json.loads(out.read_text()), capsys.readouterr().out
    assert list(record["rows"][0]["arms"]) == ARMS
    assert record["departures"][0] == "layers 1 instead of 32"
    assert "peak memory of the paper's appendix C.1, scaled: layers 1 instead of 32" in said
    assert "14.791" in said


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--table8"], "--table8 and --peak-memory are protocols of their own"),
        (["--lengths", "9"], "--lengths is set by --peak-memory"),
        (["--new-tokens", "9"], "--new-tokens is set by --peak-memory"),
        (["--pairs", "9"], "--pairs is set by --peak-memory"),
        (["--kv-dtype", "int8"], "--kv-dtype is set by --peak-memory"),
    ],
)
def test_what_the_protocol_says_itself_is_refused(extra, words, capsys):
    assert main(["benchmark", "--model", LLAMA, "--random", "--peak-memory", *extra]) == 2
    assert words in capsys.readouterr().err
