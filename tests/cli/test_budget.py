"""``subtoken-train budget`` and ``recommend``: exact figures, what was measured, spellings that mean it, refusals."""

import shlex
from types import SimpleNamespace

import pytest
import yaml

from subtoken_train.cli import generate
from subtoken_train.cli.command_line import Parser, arm_options
from subtoken_train.cli.recommend import GOALS, MeasuredArm, least, read_measured, spellings
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.ledger.kv_budget import GEOMETRIES
from subtoken_train.settings import ARM_SETTINGS
from tests.support.commands import printed

PAPER = ["--keep-ratio", ".25", "--num-groups", "16", "--kept-groups", "4"]
LLAVA = ["--model", "llava-1.5-7b", "--tokens", "576"]


def figures(capsys, *argv):
    """The lines of a budget as words, by the first of each."""
    words = [line.split() for line in printed(capsys, "budget", *argv).splitlines() if line.strip()]
    return {first: rest for first, *rest in words}


def test_fractions_and_bytes(capsys):
    rows = {name: row[0] for name, row in figures(capsys, *PAPER).items()}
    assert rows == {"K/S": "0.25", "rho_KV": "0.625", "rho_total": "0.15625", "anchor": "0.15625"}
    rows = figures(capsys, *PAPER, *LLAVA)
    assert rows["llava-1.5-7b:"][:2] == ["512", "KiB"]
    assert rows["dense"] == ["576", "288.000", "100.000%"]
    assert rows["routed"][:6] == ["144", "45.000", "15.625%", "+", "9.0", "KiB"]  # 16 groups: 2 bytes x 144 x 32 layers
    assert rows["anchor"] == ["90", "45.000", "15.625%"]


def test_evictions_and_formats(capsys):
    rows = figures(capsys, "--eviction-keep", "0.5", "--kv-dtype", "int8", *LLAVA)
    assert (rows["rho_total"][0], rows["routed"][:3]) == ("0.5", ["288", "144.000", "50.000%"])
    assert rows["int8"] == ["288", "73.125", "25.391%"]  # of 128 numbers 130 bytes instead of 256
    assert figures(capsys, *PAPER, "--eviction-keep", "0.5")["rho_total"][0] == "0.078125"


KIB = {"llava-1.5-7b": 512, "llava-1.5-13b": 800, "llama-2-7b": 512}
KIB |= {"qwen2.5-7b": 56, "qwen2.5-vl-3b": 36, "qwen2.5-vl-7b": 56}


def test_geometries(capsys):
    for model, kib in KIB.items():
        assert GEOMETRIES[model].token_bytes == kib * 1024
        assert figures(capsys, *PAPER, "--model", model)[f"{model}:"][:2] == [str(kib), "KiB"]


NAMES, ARMS = read_measured("text")
TURNED = "value groups by norm, values turned"


def arm(name, **on):
    found = {arm: {"bytes": size, "facts": [facts] * 3, "text": [text] * 3} for arm, (size, facts, text) in on.items()}
    return MeasuredArm(name, {}, found)


def test_least_on_one_model_and_where_it_loses_most_on_several():
    first = arm("first", a=(0.2, 0.0, 1.0), b=(0.2, 3.0, 1.0))
    second, alone = arm("second", a=(0.2, 1.0, 0.5), b=(0.21, 1.0, 0.5)), arm("alone", b=(0.2, 0.0, 0.0))
    same = arm("same", a=(0.1, 1.0, 2.0), b=(0.1, 1.0, 2.0))
    arms = [first, second, alone, same]
    assert least(arms, "a", 0.2, "facts") is first
    assert least(arms, "b", 0.2, "facts") is alone
    assert least(arms, "ab", 0.205, "text") is first  # the second takes too much on b
    assert least(arms, "ab", 0.21, "text") is second
    assert least(arms, "ab", 0.21, "facts") is same  # loses as much as the second, in fewer bytes
    assert least(arms, "ab", 0.05, "facts") is None
    first.on["a"]["words"], second.on["a"]["words"] = [-0.2] * 3, [-0.1] * 3
    assert least(arms, "a", 0.2, "facts") is second  # facts in words come before codes


@pytest.mark.parametrize("measured", [*ARMS, *read_measured("tasks")[1]], ids=lambda each: each.arm)
def test_every_spelling_means_what_was_measured(measured):
    assert measured.settings.keys() <= ARM_SETTINGS.keys()
    written, seen = dict(spellings(measured.settings, "checkpoints/smollm2")), {}

    def from_pretrained(path, **settings):
        seen.update(settings, backbone=path)
        return SimpleNamespace(ask=lambda text, questions: None)

    model = SimpleNamespace(from_pretrained=from_pretrained)
    eval(written["Python"], {"SubTokenModel": model, "text": "", "questions": []})
    expected = {"backbone": "checkpoints/smollm2", **measured.settings}
    assert seen == expected
    assert yaml.safe_load(written["grid"]) == {"arms": [expected]}
    program, command, *words = shlex.split(written["command"].removesuffix(" < FILE"))
    assert (program, command) == ("subtoken-train", "generate")
    parser = Parser()
    generate.add_arguments(parser)
    own = arm_options(parser.parse_args(words))
    own |= {key: float(value) for key, value in own.items() if key == "eviction_keep"}
    assert ArmSpec(**own) == ArmSpec(**expected)


SAID = {
    ("0.2",): [
        "For facts that are asked for later: kvzip 37.5% in int4_rotated\n  measured on   ",
        f"\nFor text that goes on: kvzip 50.5% in int4_rotated, 12 of 16 {TURNED}\n",
        "\n  Qwen2.5-Coder-0.5B  12.3%  -0.06 [-0.08, -0.04]  +0.0 [-1.1, +1.1]",
        "\n  SmolLM2-135M        10.1%  +0.38 [+0.26, +0.50]  -7.5 [-11.7, -3.3]         -1.7 [-5.0, +0.0]",
        "KVzip reads a context twice",
        "checkpoints/NAME",
    ],
    ("0.09", "--model", "qwen05"): [
        "  first    subtoken-train axes checkpoints/qwen05 checkpoints/qwen05-axes --data TEXT",
        'SubTokenModel.from_pretrained("checkpoints/qwen05-axes", eviction="kvzip"',
    ],
    ("0.25", "--model", "smollm2"): [
        "\nFor text that goes on: kvzip 47.3% in int8, 3/4 of the key channels\n",
        'SubTokenModel.from_pretrained("checkpoints/smollm2", eviction="kvzip", eviction_keep=0.473',
    ],
    ("0.13",): [
        f"\n{GOALS['tasks']}: kvzip 0.466 int4_rotated\n",
        "\n  Qwen2.5-Coder-0.5B, 2,048 tokens  12.4%  -1.0 [-5.2, +2.7]",
        "\n  Qwen2.5-Coder-0.5B, 4,096 tokens  12.4%  +2.5 [-3.3, +7.9]",
        "  RULER's tasks, Qwen2.5-Coder-0.5B, 2,048 tokens: +0.1 [-5.5, +5.3] points lost",
    ],
    ("0.1",): ["tasks): nothing was measured here"],
    ("0.1", "--model", "smollm2"): [
        f": kvzip 27.3% in int4_rotated, 8 of 16 {TURNED}\n  facts in words: not asked in this budget, so codes",
        "nearest above, by facts in words: kvzip 37.5% in int4_rotated (10.1%), --budget 0.101\n",
        "tasks): nothing was measured here",
    ],
    ("0.105", "--model", "smollm2"): [
        "For facts and for text: kvzip 37.5% in int4_rotated\n  measured",
        "-1.7 [-5.0, +0.0]  ",
    ],
}


@pytest.mark.parametrize("words", SAID, ids=" ".join)
def test_what_is_said(capsys, words):
    out = printed(capsys, "recommend", "--budget", *words)
    assert [said for said in SAID[words] if said not in out] == []
    assert "smollm2" not in words or "Qwen" not in out
