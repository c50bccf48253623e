"""``subtoken-train calibrate``: files that methods read, and wrong input in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints.tiny_llama import build_model, build_tokenizer
from subtoken_train.cli import calibrate
from subtoken_train.cli.main import main
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.evictions import build_eviction
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import check_calibration
from subtoken_train.families.load import load_family
from tests.support.commands import refused
from tests.support.sampling import sampled

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
SHORT = {
    "q_filter": ["--option", "samples=2", "--option", "context_length=300"],
    "prefixkv": ["--option", "samples=2", "--option", "context_length=300"],
    "duo_attention": ["--option", "samples=4", "--option", "context_length=300"],
    "kvzap": ["--option", "samples=2", "--option", "context_length=300"],
    "headkv": ["--option", "samples=2", "--option", "context_length=300"],
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Two layers, random; the second folder has one more."""
    folders = []
    for layers in (2, 3):
        folder = tmp_path_factory.mktemp("llama") / f"llama-{layers}"
        torch.manual_seed(0)
        build_model(layers=layers).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        folders.append(str(folder))
    return folders


def test_a_file_that_came_while_it_ran_stays(llama, tmp_path, capsys, monkeypatch):
    """Of two that were started together one writes and the other is told; with --overwrite both write."""
    out, load = tmp_path / ("n" * 245 + ".json"), calibrate._load

    def slow(args):
        out.write_text("theirs")
        return load(args)

    monkeypatch.setattr(calibrate, "_load", slow)
    words = ["calibrate", "prefixkv", "--backbone", llama[0], "--out", str(out), *SHORT["prefixkv"]]
    assert "came while this command ran, so it stays and nothing was written" in refused(capsys, *words)
    assert out.read_text() == "theirs"
    assert main([*words, "--overwrite"]) == 0
    assert json.loads(out.read_text())["method"] == "prefixkv"
    assert list(tmp_path.iterdir()) == [out]


def test_a_name_that_no_file_has_is_said_before_the_work(llama, tmp_path, capsys):
    words = ["calibrate", "prefixkv", "--backbone", str(tmp_path / "none"), "--out", str(tmp_path / ("n" * 256))]
    assert "File name too long" in refused(capsys, *words)


@sampled("method", SHORT, every=3)
def test_a_file_is_written_and_read_by_its_backbone_alone(llama, tmp_path, capsys, method):
    out = tmp_path / "new" / "made.json"
    words = ["calibrate", method, "--backbone", llama[0], "--out", str(out), *SHORT[method]]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert f"calibration of {method} written to {out}" in captured.out
    assert "GPU" not in captured.err + captured.out
    content = json.loads(out.read_text())
    assert (content["method"], content["backbone"]["path"]) == (method, llama[0])
    assert content["data"]["name"] == "recall"
    assert "exists; name another file, or pass --overwrite" in refused(capsys, *words)
    answer = ["--prompt", "Code baran amber falcon. " * 20, "--context-length", "60", "--max-new-tokens", "2"]
    evict = ["--eviction", method, "--eviction-keep", "0.5", "--eviction-option", f"calibration={out}"]
    assert main(["generate", "--backbone", llama[0], *answer, *evict]) == 0
    assert f"{method} 0.5" in capsys.readouterr().out
    assert "this backbone is another one" in refused(capsys, "generate", "--backbone", llama[1], *answer, *evict)


def test_images_from_a_file(tmp_path, capsys):
    data = tmp_path / "scenes"
    write_scenes(data, train=4, dev=4, test=4)
    words = [
        "calibrate",
        "prefixkv",
        "--backbone",
        str(CHECKPOINTS / "tiny-llava"),
        "--out",
        str(tmp_path / "made.json"),
    ]
    assert "is calibrated on a file of records with images" in refused(capsys, *words)
    assert main([*words, "--data", str(data / "dev.json"), "--option", "samples=3"]) == 0
    content = json.loads((tmp_path / "made.json").read_text())
    assert content["data"]["name"] == "dev.json"
    assert len(content["data"]["sha256"]) == 64
    assert content["data"]["samples"] == 3
    nets = tmp_path / "nets.json"
    small = ["--option", "samples=2", "--option", "hidden=8", "--option", "epochs=1", "--out", str(nets)]
    assert main(["calibrate", "kvzap", *words[2:4], "--data", str(data / "dev.json"), *small]) == 0
    assert "2 prompts of dev.json" in capsys.readouterr().out
    picture = CHECKPOINTS.parent / "data/samples/a.png"
    evict = ["--eviction", "kvzap", "--eviction-keep", "0.25", "--eviction-option", f"calibration={nets}"]
    asked = ["--image", str(picture), "--prompt", "what is there ?", "--max-new-tokens", "1"]
    assert main(["generate", *words[2:4], *asked, *evict]) == 0
    assert "kvzap 0.25" in capsys.readouterr().out
    duo = ["calibrate", "duo_attention", *words[2:], "--overwrite", "--data", str(data / "dev.json")]
    assert "calibrated on recall of text, and the backbone sees images" in refused(capsys, *duo)
    assert json.loads((tmp_path / "made.json").read_text()) == content  # a refusal leaves what was there


def test_heads_of_pictures_are_found_on_scenes_that_are_drawn(tmp_path, capsys):
    llava, out = ["--backbone", str(CHECKPOINTS / "tiny-llava")], tmp_path / "heads.json"
    assert main(["calibrate", "sparsemm", *llava, "--option", "samples=2", "--out", str(out)]) == 0
    assert "2 prompts of scenes" in capsys.readouterr().out
    picture = ["--image", str(CHECKPOINTS.parent / "data/samples/a.png"), "--prompt", "what is there ?"]
    asked = ["generate", *llava, *picture, "--max-new-tokens", "1", "--eviction", "sparsemm", "--eviction-keep", "0.25"]
    assert main([*asked, "--eviction-option", f"calibration={out}"]) == 0
    assert "sparsemm 0.25" in capsys.readouterr().out
    assert "calibration names no file of them; 'subtoken-train calibrate sparsemm' writes one" in refused(
        capsys, *asked
    )


def test_an_adapter_s_file_names_its_backbone(text_adapter, tmp_path, capsys):
    out = tmp_path / "made.json"
    assert main(["calibrate", "prefixkv", "--adapter", str(text_adapter), "--out", str(out), *SHORT["prefixkv"]]) == 0
    config = json.loads((text_adapter / "subtoken_config.json").read_text())
    assert json.loads(out.read_text())["backbone"] == config["identity"]
    assert "calibrated on whole caches" in refused(
        capsys, "calibrate", "duo_attention", "--adapter", str(text_adapter), "--out", str(tmp_path / "b.json")
    )


def test_a_threshold_meets_a_mean_on_the_reader_s_own_prompts(llama, tmp_path, capsys):
    prompts, out = tmp_path / "dev.jsonl", tmp_path / "made.json"
    texts = [f"Code {name} amber falcon. " * 30 + "What is the code?" for name in ("baran", "kestrel", "polar")]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = ["calibrate", "threshold", "--backbone", llama[0], "--out", str(out), "--data", str(prompts)]
    settings = ["eviction=keydiff", "keep=0.4", "window=8", "samples=2"]
    assert main([*words, *(part for each in settings for part in ("--option", each))]) == 0
    printed = capsys.readouterr().out
    content = json.loads(out.read_text())
    numbers, data = content["numbers"], content["data"]
    assert (data["name"], data["samples"], len(data["sha256"])) == ("dev.jsonl", 2, 64)
    assert 0.35 < numbers["mean"] <= 0.4
    assert f"keeps {numbers['mean']:.3%} of the entries in scope" in printed
    answer = ["--prompt", texts[0], "--max-new-tokens", "1", "--eviction", "keydiff"]
    assert main(["generate", "--backbone", llama[0], *answer, "--eviction-keep", f"threshold:{out}"]) == 0
    assert f"window=8 mean {numbers['mean']:.4g}" in capsys.readouterr().out
    wrong = ["--eviction-keep", f"threshold:{out}"]
    assert "this backbone is another one" in refused(capsys, "generate", "--backbone", llama[1], *answer, *wrong)


def test_the_shipped_file_is_of_the_shipped_model(capsys):
    path = CHECKPOINTS / "calibrations/tiny-llama_duo_attention.json"
    words = ["generate", "--backbone", str(CHECKPOINTS / "tiny-llama"), "--prompt", "Code baran amber falcon."]
    evict = ["--eviction", "duo_attention", "--eviction-keep", "0.5", "--eviction-option", f"calibration={path}"]
    assert main([*words, "--max-new-tokens", "1", *evict]) == 0
    content = json.loads(path.read_text())
    assert content["backbone"]["path"] == "checkpoints/tiny-llama"
    assert (content["data"]["samples"], content["settings"]["samples"]) == (200, 200)
    assert "duo_attention 0.5" in capsys.readouterr().out


def test_the_shipped_heads_are_of_the_shipped_model():
    path = CHECKPOINTS / "calibrations/tiny-llava_sparsemm.json"
    made = build_eviction("sparsemm", calibration=str(path)).calibrated
    check_calibration(made, load_family(BackboneConfig(str(CHECKPOINTS / "tiny-llava"))))
    assert (made.backbone.path, made.data.samples) == ("checkpoints/tiny-llava", 50)
    with pytest.raises(ValueError, match="this backbone is another one"):
        check_calibration(made, load_family(BackboneConfig(str(CHECKPOINTS / "tiny-llama"))))


WRONG = [
    (["nope", "--backbone", "X"], "unknown method that is calibrated 'nope'"),
    (["prefixkv"], "give --adapter DIR, or --backbone PATH"),
    (["prefixkv", "--backbone", "X", "--option", "samples=0"], "prefixkv samples is 0"),
    (["prefixkv", "--backbone", "X", "--option", "samples=x"], "prefixkv samples='x' must be a whole number"),
    (["prefixkv", "--backbone", "X", "--option", "sample=3"], "unknown option of prefixkv 'sample'. Did you mean"),
    (["prefixkv", "--backbone", "X", "--option", "samples"], "must be written key=value"),
    (["duo_attention", "--backbone", "X", "--option", "learning_rate=nan"], "duo_attention learning_rate is nan"),
    (["prefixkv", "--backbone", "nowhere/at/all"], "nowhere/at/all"),
    (["threshold", "--backbone", "X", "--option", "keep=1"], "threshold keep=1 must lie between 0 and 1"),
    (["threshold", "--backbone", "X", "--option", "eviction=h2o"], "'h2o', as it is set, has no scores that mean"),
    (["threshold", "--backbone", "X", "--option", "eviction=snapkv"], "'snapkv', as it is set, has no scores"),
    (["threshold", "--backbone", "X", "--option", "eviction_options=chunks=3"], "unknown setting of kvzip 'chunks'"),
    (["prefixkv", "--backbone", str(CHECKPOINTS / "tiny-llama"), "--data", "english"], "calibrated on 'recall'"),
    (["kvzap", "--backbone", str(CHECKPOINTS / "tiny-llama"), "--data", "no.txt"], "neither 'recall' nor a file"),
    (["kvzap", "--backbone", "X", "--option", "normalise=1"], "normalise"),
    (["headkv", "--backbone", str(CHECKPOINTS / "tiny-llava")], "the backbone sees images; use sparsemm"),
    (["sparsemm", "--backbone", str(CHECKPOINTS / "tiny-llama")], "the backbone sees none; use headkv"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_input_is_one_line(tmp_path, capsys, words, message):
    assert message in refused(capsys, "calibrate", *words, "--out", tmp_path / "made.json")
    assert not (tmp_path / "made.json").exists()


def test_a_damaged_file_is_one_line(llama, tmp_path, capsys):
    out = tmp_path / "made.json"
    assert main(["calibrate", "prefixkv", "--backbone", llama[0], "--out", str(out), *SHORT["prefixkv"]]) == 0
    shutil.copy(out, tmp_path / "cut.json")
    (tmp_path / "cut.json").write_bytes(out.read_bytes()[:-20])
    capsys.readouterr()
    words = ["generate", "--backbone", llama[0], "--prompt", "x", "--eviction", "prefixkv", "--eviction-keep", "0.5"]
    assert "cut.json: invalid JSON" in refused(
        capsys, *words, "--eviction-option", f"calibration={tmp_path / 'cut.json'}"
    )
