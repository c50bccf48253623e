"""``check``: counts, budget, data, lengths, time; ``preview``: runs of tokens with their regions."""

import json
import re
import shutil
import socket

import pytest
import torch
import yaml
from PIL import Image

from checkpoints.tiny_llava import build_processor
from subtoken_train.cli.preview import sample_lines
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.image_sources import count_named
from subtoken_train.datasets.scenes import write_scene_split
from subtoken_train.families.qwen_vl import Qwen25VLFamily
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Batch, Region
from tests.support.commands import check_refused, checked, printed, stopped
from tests.support.places import RECIPES, ROOT, recipe
from tests.support.run_folders import inits, own_images
from tests.support.sampling import sampled

LLAVA = ["--config", str(recipe("llava7b_fastv25_s16k4"))]
TINY = ["--config", str(recipe("tiny_fastv25_s16k4"))]


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@sampled(("overlay", "weights", "peak"), [("qlora_nf4", "4.21", "5.25"), ("int8", "7.13", "8.17")], every=2)
def test_a_7b_recipe_fits_24_gb_with_an_overlay(capsys, no_network, overlay, weights, peak):
    lines = checked(capsys, [*LLAVA, "--config", str(RECIPES / "memory" / f"{overlay}.yaml"), "--offline"])
    assert any(f"bfloat16 ({overlay.removeprefix('qlora_')} decoder)" in line for line in lines)
    assert {f"frozen weights {weights} GiB", "trained 192 10,486,272", f"peak {peak} GiB"} <= set(lines)
    assert "10,000 optimiser steps, 640,000 records" in lines


def test_devices_that_share_weights_hold_less_and_4_bit_weights_are_not_shared(capsys, no_network):
    argv = [*LLAVA, "--offline", "--trainer.devices", "8", "--trainer.strategy"]
    where = "8 records of 2,048 tokens (1,616 after the reducer), on each of 8 devices"
    assert {"optimiser state 10.00 MiB", "frozen weights 13.16 GiB", where} <= set(checked(capsys, [*argv, "zero2"]))
    assert "frozen weights 1.64 GiB" in checked(capsys, [*argv, "fsdp2", *["--model.gradient_checkpointing", "false"]])
    assert "use ddp or zero2" in check_refused(capsys, [*argv, "fsdp2", "--model.backbone.quantization", "nf4"])


def test_tiny_offline_with_overrides(capsys, no_network):
    lines = checked(capsys, [*TINY, "--offline", "--model.routing.selector", "value_norm", "--trainer.max_steps=10"])
    assert "trained 24 24,576" in lines  # q and v of 6 layers; a value-norm selector has nothing to train
    assert not any(line.startswith("routers") for line in lines)
    assert "visual 64 16 8,192 2,048 32 15.625 %" in lines
    assert "10 optimiser steps, 320 records" in lines
    assert lines[-1].endswith("--trainer.max_steps=10")


def test_a_token_only_arm_has_no_anchor(capsys):
    wanted = {"matched anchor: none, this arm routes nothing", "visual region: 96.00 KiB of 384.00 KiB, 25 %"}
    assert wanted <= set(checked(capsys, [*TINY, "--offline", "--model.routing", "null"]))


def test_a_stored_mean_is_counted_and_nothing_dropped_is_nothing_to_fill(capsys):
    filled = [*TINY, "--offline", "--model.routing.fill=mean", "--model.routing.kept_groups"]
    lines = checked(capsys, [*filled, "3"])
    assert "routing S16K3 linear, contiguous, per_token budget, fill mean, balance weight 0.01" in lines
    assert "visual 64 16 8,192 2,048 32 15.625 %" in lines  # 16 tokens of 3 groups, and one vector
    assert any(line.startswith("matched anchor: 10 of 64 visual tokens") for line in lines)
    assert "fill 'mean' does nothing where kept_groups = num_groups = 16" in check_refused(capsys, [*filled, "16"])


def test_decoder_stage_shows_both_bands_and_why_the_nominal_anchor_fails(capsys):
    lines = checked(capsys, [*TINY, "--offline", "--model.reducer.stage", "decoder"])
    wanted = {f"layers {layers} system 5 5 2,560 2,560 0 100 %" for layers in ("0-1", "2-5")}
    wanted |= {"visual 64 64 32,768 32,768 0 100 %"}
    wanted |= {"matched anchor: 10 of 64 visual tokens, every group (keep_ratio 0.15625), 43.75 %"}
    assert wanted <= set(lines)
    assert any(line.startswith("at the nominal 15.625 % of all layers: no token-only anchor") for line in lines)


def test_decoder_stage_on_a_deep_model_has_a_nominal_anchor(capsys):
    lines = checked(capsys, [*LLAVA, "--offline", "--model.reducer.stage", "decoder"])
    nominal = "58 of 576 visual tokens, every group (keep_ratio 0.100694), 15.6901 %"
    assert f"at the nominal 15.625 % of all layers: {nominal}" in lines
    assert "routers (linear) 60 1,966,560" in lines  # 30 of 32 layers


@pytest.fixture
def data_file(tmp_path):
    """Five records with one image."""
    for name in ("a.png", "other.png"):
        Image.new("RGB", (96, 96)).save(tmp_path / name)
    turns = [{"from": "human", "value": "<image>\nhow many 3 ?"}, {"from": "gpt", "value": "2"}]
    records = [{"id": f"r{i}", "image": "a.png" if i == 0 else "other.png", "conversations": turns} for i in range(5)]
    path = tmp_path / "train.json"
    path.write_text(json.dumps(records))
    return path


def test_data_is_read_and_its_first_record_encoded(capsys, data_file):
    argv = [*TINY, "--data.train_file", str(data_file), "--data.val_file", str(data_file), "--data.batch_size", "1"]
    lines = checked(capsys, [*argv, "--trainer.accumulate_grad_batches", "2", "--trainer.max_steps", "6"])
    wanted = {f"{data_file}: 5 records", f"{data_file}: 5 records for validation"}
    wanted |= {f"below {data_file.parent}: all 2 images are there"}
    wanted |= {"2 records per optimiser step: batch 1 x accumulation 2 x 1 device"}
    wanted |= {"6 optimiser steps, 12 records, 2.00 epochs"}  # 5 batches are 3 windows, the last one shorter
    assert wanted <= set(lines)
    assert any(line.startswith("first record 'r0': ") and "64 visual" in line for line in lines)


def test_absent_videos_are_counted(capsys, data_file):
    turns = [{"from": "human", "value": "<video>\nhow many 3 ?"}, {"from": "gpt", "value": "2"}]
    data_file.write_text(json.dumps([{"id": i, "videos": [f"clip{i}"], "conversations": turns} for i in range(3)]))
    words = "record '0': llava takes images and no videos"
    assert words in check_refused(capsys, [*TINY, "--data.train_file", str(data_file)])
    data = InstructionDataModule(str(data_file))
    data.read()
    with pytest.raises(ValueError, match=r"3 of 3 videos \(folders of frames\) of .*train.json are missing"):
        data.check_images(Qwen25VLFamily, build_reducer("none"))
    for i in range(3):
        (data_file.parent / f"clip{i}").mkdir()
        Image.new("RGB", (8, 8)).save(data_file.parent / f"clip{i}/000001.jpg")
    assert count_named(data.check_images(Qwen25VLFamily, build_reducer("none"))) == "3 videos"


ANCHOR = ROOT / "checkpoints" / "adapters" / "tiny_fastv25_s16k4_anchor"
ON_ANCHOR = ["--model.reducer.keep_ratio=0.15625", "--model.reducer.round_up=true", f"--model.stage2.adapter={ANCHOR}"]
OUTPUT = ["--model.stage2.output_lora={rank: 8, alpha: 16, dropout: 0.05}"]


def test_routers_alone(capsys):
    lines = checked(capsys, [*TINY, "--model.stage2.adapter=nowhere", "--offline"])
    assert {"routers (linear) 12 12,384", "trained 12 12,384", "of it stage 1's LoRA 24 24,576"} <= set(lines)
    assert not any(line.startswith("LoRA o_proj") for line in lines)


def test_a_stage_1_folder_is_read_and_gives_the_lora(capsys, data_file):
    """The recipe leaves the LoRA out; the anchor's is rank 8."""
    data = [f"--data.train_file={data_file}", "--data.batch_size=1"]
    lines = checked(capsys, [*TINY, "--model.lora=null", *ON_ANCHOR, *OUTPUT, *data])
    assert f"stage 2 on {ANCHOR} (token-only, under the same reducer; its LoRA, as above, is frozen)" in lines
    wanted = {"LoRA rank 8, alpha 16, dropout 0", "o_proj LoRA rank 8, alpha 16, dropout 0.05"}
    assert {*wanted, "LoRA o_proj 12 12,288", "of it stage 1's LoRA 24 24,576"} <= set(lines)


@pytest.fixture
def records(tmp_path):
    """Ten records about images; in the third more is asked than others say."""
    own_images(tmp_path / "mine")
    rows = []
    for number in range(10):
        words = "list . " * (30 if number == 3 else 1) + "describe ." * (20 if number == 5 else 1)
        turns = [{"from": "human", "value": f"<image>\n{words}"}, {"from": "gpt", "value": "none " * (number + 1)}]
        rows.append({"id": f"r{number}", "image": f"images/{number % 6:02d}.png", "conversations": turns})
    (tmp_path / "mine/train.json").write_text(json.dumps(rows))
    return tmp_path / "mine/train.json"


def of(records, *more):
    return [*TINY, "--data.train_file", str(records), "--data.batch_size", "2", *more]


def line_of(lines, start):
    return next(line for line in lines if line.startswith(start))


@pytest.mark.slow
def test_lengths_of_all_records(capsys, records):
    lines = checked(capsys, of(records))
    words = line_of(lines, "tokens of all 10 records: ")
    shortest, median, longest = map(int, re.findall(r"(\d+) (?:shortest|median|longest)", words))
    assert 64 < shortest < median < longest
    assert words.endswith("max_length 160 cuts none")
    assert int(re.search(r"first record 'r0': (\d+) tokens", "\n".join(lines))[1]) == shortest
    cut = line_of(checked(capsys, of(records, "--data.max_length", str(longest - 1))), "tokens of all 10")
    assert f"max_length {longest - 1} cuts 1 (10 %)" in cut
    lines, message = stopped(capsys, of(records, "--data.max_length", str(shortest + 20)))
    in_a_question = r"cuts \d \(\d0 %\), ([12]) of them in a question, where fit stops"
    inside = re.search(in_a_question, line_of(lines, "tokens of all 10"))[1]
    words = f"fit would stop: data.max_length {shortest + 20} cuts the questions of {inside} of 10 records; raise"
    assert message.startswith(words)


def test_records_that_cannot_be_used_are_counted(capsys, records):
    (records.parent / "images/04.png").write_bytes(b"none")
    lines, message = stopped(capsys, of(records))
    assert line_of(lines, "1 of 10 cannot be used: record 'r4': image")
    assert message.startswith("fit would stop: record 'r4': image")


@pytest.mark.slow
def test_the_time_is_measured(capsys, records):
    argv = of(records, "--trainer.max_steps", "7", "--trainer.accumulate_grad_batches", "2")
    words = line_of(checked(capsys, argv), "expected time: about ")
    measured = r"about (\d+) s \(([\d.]+) s a batch, measured now on this machine; start, logs, validation and check"
    total, each = re.match(f"expected time: {measured}", words).groups()
    assert abs(int(total) - max(1, 14 * float(each))) <= 1 + 14 * float(each) / 20


def test_a_time_that_cannot_be_told_says_why(capsys, records):
    for option, why in (
        ("--trainer.accelerator=gpu", "training is to run on an accelerator"),
        ("--trainer.precision=bf16-mixed", "in this precision"),
        ("--model.distillation.weight=1", "with a teacher or in stage 2"),
    ):
        words = f"expected time: not measured ({why}); fit shows its pace from the first steps on"
        assert words in checked(capsys, of(records, option))


def test_texts(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/book.txt").write_text("\n\n".join(f"Fact {i} of it is {'so ' * 90}." for i in range(150)))
    inits(capsys, "mine")
    argv = ["--config", "mine_subtoken/mine.yaml"]
    lines = checked(capsys, argv)
    assert int(re.search(r"documents: .* together, about (\d+) blocks", line_of(lines, "tokens of all "))[1]) >= 2
    assert line_of(lines, "expected time: about ")
    assert "fewer than one block of block_length 99,999" in check_refused(
        capsys, [*argv, "--data.block_length", "99999"]
    )


def test_a_scene_as_the_loss_sees_it(tmp_path, capsys):
    """By the embedded VLM's recipe on four scenes."""
    write_scene_split(tmp_path / "scenes", "train", 4, seed=0)
    out = printed(capsys, "preview", *of(tmp_path / "scenes/train.json", "--data.val_file", "null"), "--count", "2")
    samples = re.findall(r"'train-00000\d', 1 image: (\d+) tokens \((.*)\), (\d+) trained", out)
    assert len(samples) == 2
    for tokens, counts, trained in samples:
        regions = {word: int(number) for number, word in (part.split() for part in counts.split(", "))}
        assert sum(regions.values()) == int(tokens)
        assert (regions["visual"], regions["answer"]) == (64, int(trained))
    assert out.count("  visual   masked      64  <image x 64>\n") == 2
    assert re.search(r"  query    masked +\d+  .* ASSISTANT:\n  answer   trained +\d+  .* </s>\n", out)


def test_a_corpus_is_shown_without_packing_it_and_without_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("subtoken_train.datasets.corpus.packed_blocks", None)
    shutil.copytree(ROOT / "checkpoints/tiny-llama", "llama", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the module is imported " * 200}))
    model = {"backbone": {"path": "llama"}, "reducer": {"name": "quest", "keep_ratio": 0.5}}
    blocks = {"train": {"name": "text.jsonl"}, "block_length": 96, "context_length": 64, "prefix_tokens": 8}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": model, "data": blocks, "trainer": {"max_steps": 3}}))
    out = printed(capsys, "preview", "--config", "mine.yaml")
    assert re.findall(r"'block (\d)': 96 tokens \(64 context, 8 query, 24 answer\), 24 trained", out) == ["0", "1", "2"]


def test_a_sample_without_a_trained_token_is_warned_about():
    ids, regions = torch.tensor([[1, 7, 8, 0]]), torch.tensor([[Region.ANSWER, Region.QUERY, Region.QUERY, 0]])
    labels = torch.tensor([[1, -100, -100, -100]])  # the first token is never a target
    batch = Batch(ids, labels, regions, torch.tensor([-1]), None, torch.tensor([0]), ["odd"])
    text = "\n".join(sample_lines(batch, build_processor().tokenizer))
    assert "'odd': 3 tokens (2 query, 1 answer), 0 trained\n  warning: no token of this sample is trained\n" in text
    assert text.count("masked") == 2
