"""``subtoken-train benchmark`` on the embedded models: sides, bytes, ratios, the record; wrong input in one line."""

import json

import pytest

from subtoken_train.benchmarking import rounds
from subtoken_train.cli.main import main
from subtoken_train.kernels.choice import choose_kernel
from tests.support.commands import printed, refused
from tests.support.places import ROOT

ADAPTERS = ROOT / "checkpoints" / "adapters"
VLM, LM, WHOLE = (str(ADAPTERS / x) for x in ("tiny_fastv25_s16k4", "tinylm_quest25_s16k12", "tiny_none100_s16k4"))
TINY_LLAVA, TINY_LLAMA = (str(ROOT / "checkpoints" / name) for name in ("tiny-llava", "tiny-llama"))
SHORT = ["--new-tokens", "1", "--pairs", "1", "--device", "cpu"]
SIDES = ["routed", "same_tokens", "anchor", "dynamic", "static"]


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """The record of a routed adapter's run."""
    out = tmp_path_factory.mktemp("benchmark") / "made" / "record.json"
    words = ["benchmark", "--adapter", VLM, "--new-tokens", "2", "--pairs", "3", "--device", "cpu"]
    assert main([*words, "--batch-sizes", "2", "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_all_sides_stand_beside_it_and_where_it_ran_is_said(routed):
    (row,) = routed["rows"]
    assert list(row["sides"]) == SIDES
    assert {row["prompt"]["length"], row["batch_size"], row["new_tokens"], row["pairs"]} == {83, 2, 3}
    assert (routed["dtype"], bool(routed["hardware"]["cpu"]), "torch" in routed["versions"]) == ("float32", True, True)
    kernels = {name: side["kernel"] for name, side in row["sides"].items()}
    assert kernels["routed"] == kernels["anchor"] == str(choose_kernel("cpu"))
    assert kernels["dynamic"] == "transformers' own"
    assert "live tensors" in routed["peak_bytes_are"]
    assert row["load_average"] >= 0
    assert all(note.startswith("load average") for note in row["notes"])


def test_bytes_are_the_caches_own(routed):
    sides = routed["rows"][0]["sides"]
    held, token = sides["routed"]["prompt_bytes"], 6 * 2 * 128 * 4  # of six layers' keys and values in fp32
    assert sides["routed"]["final_bytes"]["tail"] == 2 * 2 * token
    assert sides["dynamic"]["prompt_bytes"]["total"] == 2 * 83 * token
    assert sides["dynamic"]["final_bytes"]["total"] == sides["static"]["final_bytes"]["total"] == 2 * 85 * token
    # text is whole in all of them; the anchor's tokens are rounded up
    assert sides["same_tokens"]["prompt_bytes"]["payload"] == 2 * 35 * token
    assert sides["anchor"]["prompt_bytes"]["payload"] == 2 * (19 + 10) * token == held["payload"]
    assert [sides[name]["entries"] for name in SIDES] == [35, 35, 29, 83, 83]


SAID = {
    "a text adapter with an eviction": (
        ["--adapter", LM, "--lengths", "256", "--eviction", "snapkv", "--eviction-keep", "0.5"],
        ["256 tokens (192 of context), batch 1, 1 forced tokens, 1 round: no intervals", "quest", "snapkv"],
    ),
    "no reducer, and an anchor that draws its tokens": (
        ["--adapter", WHOLE],
        ["anchor: token-only anchor of equal bytes, random 0.625, whole values"],
    ),
    "a backbone alone, its own anchor": (
        ["--model", TINY_LLAVA, "--random", "--reducer", "fastv", "--keep-ratio", "0.5"],
        [
            "random weights, without LoRA, 6 layers, float32", "\npacked ", "\ndynamic ",
            "note: it drops no value group, so it is its own token-only anchor and its own same-tokens cache",
        ],
    ),
    "a recipe, untrained in another dtype": (
        ["--config", "tiny_visionzip25_s16k4", "--random", "--dtype", "bfloat16"],
        [
            "untrained", "with LoRA, 6 layers, bfloat16",
            "anchor: token-only anchor of equal bytes, visionzip 0.15625",
        ],
    ),
    # keys in the last window stay whole, here all of them, and the ledger takes half of their channels for gone
    "an anchor of other bytes": (
        ["--adapter", VLM, "--key-channels", "0.5"],
        ["note: the anchor's prompt takes 165,888 bytes, -7.4% against the arm's 179,136"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "words"), SAID.values(), ids=SAID)
def test_what_is_said_of_an_arm(capsys, argv, words):
    said = printed(capsys, "benchmark", *argv, *SHORT)
    assert [word for word in words if word not in said] == []
    assert "--key-channels" not in argv or "[" not in said.split("\nrouted: ")[0]  # one round has no interval


def test_table8_scaled_says_what_is_scaled(tmp_path, capsys):
    out = tmp_path / "table8.json"
    assert main(["benchmark", "--model", TINY_LLAVA, *SHORT, "--table8", "--out", str(out)]) == 0
    record, said = json.loads(out.read_text()), capsys.readouterr().out
    rows = [f"{reducer} {share}%" for reducer in ("fastv", "visionzip") for share in ("25.0", "12.5")]
    assert [row["table8"] for row in record["rows"]] == rows
    assert [row["sides"]["routed"]["entries"] for row in record["rows"]] == [35, 27, 35, 27]
    assert all(list(row["sides"]) == SIDES for row in record["rows"])
    precision, steps = "float32 instead of bfloat16", "1 forced tokens instead of 256"
    wanted = ("none of the paper's backbones", "on a CPU", precision, steps)
    for words, departure in zip(wanted, record["departures"], strict=False):
        assert words in departure
        assert departure in said
    assert record["departures"][-1] == "an image of 64 tokens"
    assert "fastv 25.0%: 83 -> 35 tokens; prefill" in said


def test_what_does_not_fit_into_the_memory_is_said(capsys):
    count = 10**12
    said = refused(capsys, "benchmark", "--model", TINY_LLAMA, *SHORT, "--random", "--batch-sizes", count, reports=True)
    assert said.startswith(f"batch size {count} of 512 tokens does not fit into the memory")


def test_what_was_measured_stays_after_ctrl_c(tmp_path, capsys, monkeypatch):
    """Three sides: a row is three timed runs that do not count, and three in its round."""
    timed, run_side = [], rounds.run_side

    def interrupted(*args):
        if len(timed) == 8:
            raise KeyboardInterrupt
        timed.append(None)
        return run_side(*args)

    monkeypatch.setattr(rounds, "run_side", interrupted)
    out, sizes = tmp_path / "record.json", ["--lengths", "96", "--batch-sizes", "1", "2", *SHORT]
    assert main(["benchmark", "--model", TINY_LLAMA, *sizes, "--out", str(out)]) == 130
    assert [row["batch_size"] for row in json.loads(out.read_text())["rows"]] == [1]
    assert "1/9 runs of row 1 of 2, about" in capsys.readouterr().err
