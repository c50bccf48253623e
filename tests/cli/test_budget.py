"""``subtoken-train budget``: exact figures and worded refusals."""

import pytest

from subtoken_train.ledger.kv_budget import GEOMETRIES
from tests.support import commands
from tests.support.commands import refused

PAPER = ["budget", "--keep-ratio", ".25", "--num-groups", "16", "--kept-groups", "4"]


def printed(capsys, argv):
    """Run a budget that must succeed; its lines as lists of words."""
    return [line.split() for line in commands.printed(capsys, *argv).splitlines()]


LLAVA = ("--model", "llava-1.5-7b", "--tokens", "576")


def test_fractions_and_bytes(capsys):
    rows = {row[0]: row[1] for row in printed(capsys, PAPER)}
    assert rows == {"K/S": "0.25", "rho_KV": "0.625", "rho_total": "0.15625", "anchor": "0.15625"}
    rows = {row[0]: row[1:] for row in printed(capsys, [*PAPER, *LLAVA]) if row}
    assert rows["llava-1.5-7b:"][:2] == ["512", "KiB"]
    assert rows["dense"] == ["576", "288.000", "100.000%"]
    assert rows["routed"][:6] == ["144", "45.000", "15.625%", "+", "9.0", "KiB"]  # 16 groups: 2 bytes x 144 x 32 layers
    assert rows["anchor"] == ["90", "45.000", "15.625%"]


def test_a_stored_mean_is_counted_and_paid_for(capsys):
    argv = ["budget", "--keep-ratio", ".25", "--fill", "mean", *LLAVA]
    lines = printed(capsys, [*argv, "--num-groups", "64", "--kept-groups", "16"])
    rows = {row[0]: row[1:] for row in lines if row}
    assert rows["rho_total"][0] == "0.15625"
    assert rows["fill"][:3] == ["a", "value", "vector"]
    assert rows["routed"][:3] == ["144", "45.250", "15.712%"]  # 32 layers of 8 KiB more
    assert rows["anchor"][0] == "91"
    assert rows["K=15"][-2:] == ["(144", "tokens)"]
    lines = printed(capsys, [*argv, "--num-groups", "16", "--kept-groups", "1"])  # no fewer groups pay for it
    assert {row[0]: row[1:] for row in lines if row}["routed"][:3] == ["144", "38.500", "13.368%"]
    assert " ".join(lines[-1]).startswith("no K with this fill takes as few bytes as K=1 without: fill mean stores")


@pytest.mark.parametrize(
    ("model", "kib"),
    [
        ("llava-1.5-7b", 512),
        ("llava-1.5-13b", 800),
        ("llama-2-7b", 512),
        ("qwen2.5-7b", 56),
        ("qwen2.5-vl-3b", 36),
        ("qwen2.5-vl-7b", 56),
    ],
)
def test_geometries(capsys, model, kib):
    assert GEOMETRIES[model].token_bytes == kib * 1024
    assert [f"{model}:", str(kib), "KiB"] == printed(capsys, [*PAPER, "--model", model])[-1][:3]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--keep-ratio": "0"}, "keep_ratio=0.0 must lie in (0, 1]"),
        ({"--keep-ratio": "1.5"}, "keep_ratio=1.5 must lie in (0, 1]"),
        ({"--keep-ratio": "nan"}, "keep_ratio=nan must lie in (0, 1]"),
        ({"--kept-groups": "17"}, "kept_groups=17 must lie between 1 and num_groups=16"),
        ({"--kept-groups": "0"}, "kept_groups=0 must lie between 1"),
        ({"--num-groups": "48"}, "num_groups=48 does not divide the value width 4096"),
        ({"--fill": "meen"}, "unknown fill 'meen'. Did you mean 'mean'?"),
        ({"--fill": "mean", "--kept-groups": "16"}, "no group is dropped"),
        ({"--num-groups": "48"}, "such as 8, 16, 32, 64"),
        ({"--tokens": "0"}, "--tokens 0 must be at least 1"),
        ({"--model": "llava-7b"}, "unknown model 'llava-7b'. Did you mean 'llava-1.5-7b'?"),
        ({"--model": None}, "--tokens needs --model"),
    ],
)
def test_wrong_input(capsys, changed, words):
    options = {**dict(zip([*PAPER[1::2], *LLAVA[::2]], [*PAPER[2::2], *LLAVA[1::2]], strict=True)), **changed}
    argv = [word for name, value in options.items() if value is not None for word in (name, value)]
    assert words in refused(capsys, "budget", *argv)
