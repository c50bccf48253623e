"""``subtoken-train check`` of stage-2 recipes: what trains, what is frozen, and the pair of stages."""

import json
from pathlib import Path

import pytest

from tests.support.check_command import checked, refused
from tests.support.places import recipe
from tests.support.sampling import sampled

ROOT = Path(__file__).resolve().parents[2]
LLAVA = ["--config", str(recipe("llava7b_fastv25_s16k4"))]
TINY = ["--config", str(recipe("tiny_fastv25_s16k4"))]
ANCHOR = ROOT / "checkpoints" / "adapters" / "tiny_fastv25_s16k4_anchor"
ON_ANCHOR = ["--model.reducer.keep_ratio=0.15625", "--model.reducer.round_up=true", f"--model.stage2.adapter={ANCHOR}"]
OUTPUT = ["--model.stage2.output_lora={rank: 8, alpha: 16, dropout: 0.05}"]


@pytest.fixture
def data(tmp_path):
    """Options that name a file of one record."""
    turns = [{"from": "human", "value": "how many 3 ?"}, {"from": "gpt", "value": "2"}]
    (tmp_path / "train.json").write_text(json.dumps([{"id": "r", "conversations": turns}]))
    return [f"--data.train_file={tmp_path / 'train.json'}", "--data.batch_size=1"]


@pytest.mark.slow
def test_llava7b_offline_without_the_stage_1_folder(capsys):
    lines = checked(capsys, [*LLAVA, "--model.stage2.adapter=runs/first/adapter", *OUTPUT, "--offline"])
    for line in (
        "stage 2 on runs/first/adapter (not read: --offline; its LoRA is taken to be as above)",
        "LoRA rank 16, alpha 32, dropout 0.05",
        "o_proj LoRA rank 8, alpha 16, dropout 0.05",
        "LoRA o_proj 64 2,097,152",
        "routers (linear) 64 2,097,664",
        "trained 128 4,194,816",
        "frozen 814 7,071,815,680",  # the backbone's 7,063,427,072 and stage 1's LoRA
        "of it stage 1's LoRA 128 8,388,608",
        "visual region: 45.00 MiB of 288.00 MiB, 15.625 % (and 9.00 KiB of group indices)",
    ):
        assert line in lines, line
    assert not any("together" in line for line in lines)


@sampled(
    ("selector", "router"), [("linear", "routers (linear) 12 12,384"), ("mlp", "routers (mlp) 24 27,936")], every=2
)
def test_routers_alone(capsys, selector, router):
    extra = ["--model.stage2.adapter=nowhere", f"--model.routing.selector={selector}", "--offline"]
    lines = checked(capsys, [*TINY, *extra])
    assert router in lines
    assert router.replace(f"routers ({selector})", "trained") in lines
    assert "of it stage 1's LoRA 24 24,576" in lines
    assert not any(line.startswith("LoRA o_proj") for line in lines)


def test_a_stage_1_folder_is_read_and_gives_the_lora(capsys, data):
    """The recipe leaves the LoRA out; the anchor's is rank 8."""
    lines = checked(capsys, [*TINY, "--model.lora=null", *ON_ANCHOR, *OUTPUT, *data])
    assert f"stage 2 on {ANCHOR} (token-only, under the same reducer; its LoRA, as above, is frozen)" in lines
    assert "LoRA rank 8, alpha 16, dropout 0" in lines
    assert "of it stage 1's LoRA 24 24,576" in lines


@sampled(
    ("extra", "words"),
    [
        ([f"--model.stage2.adapter={ANCHOR}", "--model.routing.kept_groups=8"], "reducer.keep_ratio 0.15625 (the"),
        ([*ON_ANCHOR, "--model.lora.rank=4"], "lora.rank 8 (the recipe has 4)"),
        (["--model.stage2.adapter=nowhere"], "stage2.adapter nowhere does not exist"),
        ([f"--model.stage2.adapter={ANCHOR.with_name('tiny_fastv25_s16k4')}"], "already routes (S16K4 linear)"),
        ([*ON_ANCHOR, "--model.backbone.path=llava-hf/llava-1.5-7b-hf"], "the adapter was trained on"),
        ([*ON_ANCHOR, "--model.routing=null"], "set model.routing, or drop model.stage2"),
    ],
    every=6,
    ids=["keep_ratio", "lora", "missing", "routed", "backbone", "routing"],
)
def test_wrong_pairs(capsys, extra, words):
    assert words in refused(capsys, [*TINY, *extra])
