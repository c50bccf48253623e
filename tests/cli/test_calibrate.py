"""``subtoken-train calibrate`` and ``axes``: files and folders that are read by their own backbone; wrong input."""

import json

import pytest
import torch

from subtoken_train import SubTokenModel
from subtoken_train.cli.main import main
from subtoken_train.datasets.scenes import write_scenes
from subtoken_train.evictions import build_eviction
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import check_calibration
from subtoken_train.families.load import load_family
from tests.support.commands import printed, refused
from tests.support.places import ROOT
from tests.support.refusals import refuses
from tests.support.sampling import sampled

CHECKPOINTS = ROOT / "checkpoints"
TINY, LLAVA = CHECKPOINTS / "tiny-llama", CHECKPOINTS / "tiny-llava"
SHORT = {name: ["samples=2", "context_length=300"] for name in ("q_filter", "prefixkv", "kvzap", "headkv")}
SHORT["duo_attention"] = ["samples=4", "context_length=300"]
ASKED = ["--image", ROOT / "data/samples/a.png", "--prompt", "what is there ?", "--max-new-tokens", "1"]


def options(*settings):
    return [word for setting in settings for word in ("--option", setting)]


def evicting(method, keep, file):
    return ["--eviction", method, "--eviction-keep", keep, "--eviction-option", f"calibration={file}"]


@sampled("method", SHORT, every=3)
def test_a_file_is_written_and_read_by_its_backbone_alone(text_adapter, tmp_path, capsys, method):
    out, llama = tmp_path / "new" / "made.json", str(text_adapter.parent / "backbone")
    words = ["calibrate", method, "--backbone", llama, "--out", str(out), *options(*SHORT[method])]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert f"calibration of {method} written to {out}" in captured.out
    assert "GPU" not in captured.err + captured.out
    content = json.loads(out.read_text())
    assert (content["method"], content["backbone"]["path"], content["data"]["name"]) == (method, llama, "recall")
    assert "exists; name another file, or pass --overwrite" in refused(capsys, *words)
    answer = ["--prompt", "Code baran amber falcon. " * 20, "--context-length", "60", "--max-new-tokens", "2"]
    evict = evicting(method, "0.5", out)
    assert f"{method} 0.5" in printed(capsys, "generate", "--backbone", llama, *answer, *evict)
    assert "this backbone is another one" in refused(capsys, "generate", "--backbone", TINY, *answer, *evict)
    (tmp_path / "cut.json").write_bytes(out.read_bytes()[:-20])
    cut = evicting(method, "0.5", tmp_path / "cut.json")
    assert "cut.json: invalid JSON" in refused(capsys, "generate", "--backbone", llama, *answer, *cut)


def test_images_from_a_file(tmp_path, capsys):
    scenes, out, nets = tmp_path / "scenes", tmp_path / "made.json", tmp_path / "nets.json"
    write_scenes(scenes, train=4, dev=4, test=4)
    data, backbone = ["--data", scenes / "dev.json"], ["--backbone", LLAVA]
    words = ["calibrate", "prefixkv", *backbone, "--out", out]
    assert "is calibrated on a file of records with images" in refused(capsys, *words)
    printed(capsys, *words, *data, "--option", "samples=3")
    content = json.loads(out.read_text())
    read = content["data"]
    assert (read["name"], len(read["sha256"]), read["samples"]) == ("dev.json", 64, 3)
    small = options("samples=2")
    assert "2 prompts of dev.json" in printed(capsys, "calibrate", "kvzap", *backbone, *data, *small, "--out", nets)
    assert "kvzap 0.25" in printed(capsys, "generate", *backbone, *ASKED, *evicting("kvzap", "0.25", nets))
    duo = ["calibrate", "duo_attention", *backbone, "--out", out, "--overwrite", *data]
    assert "calibrated on recall of text, and the backbone sees images" in refused(capsys, *duo)
    assert json.loads(out.read_text()) == content  # a refusal leaves what was there


def test_budgets_of_heads_are_learned_on_a_text_and_read_by_a_wrapper(tmp_path, capsys):
    out, tiny = tmp_path / "lkv.json", ["--backbone", TINY]
    few = options("samples=2", "context_length=60", "following=20", "keep=0.3", "eviction=knorm")
    words = ["calibrate", "lkv", *tiny, "--data", ROOT / "data/samples/long.txt", "--out", out]
    assert "score of every head, a line per layer" in printed(capsys, *words, *few)
    prompt = ["--prompt", "Code baran amber falcon. " * 20, "--max-new-tokens", "1"]
    assert "lkv(knorm) 0.25" in printed(capsys, "generate", *tiny, *prompt, *evicting("lkv(knorm)", "0.25", out))
    assert "lkv keep=0.001 must leave a head" in refused(capsys, *words, "--overwrite", *options("keep=0.001"))


def test_heads_of_pictures_are_found_on_scenes_that_are_drawn(tmp_path, capsys):
    llava, out = ["--backbone", LLAVA], tmp_path / "heads.json"
    said = printed(capsys, "calibrate", "sparsemm", *llava, "--option", "samples=2", "--out", out)
    assert "2 prompts of scenes" in said
    assert "sparsemm 0.25" in printed(capsys, "generate", *llava, *ASKED, *evicting("sparsemm", "0.25", out))
    words = "calibration names no file of them; 'subtoken-train calibrate sparsemm' writes one"
    assert words in refused(capsys, "generate", *llava, *ASKED, *["--eviction", "sparsemm", "--eviction-keep", "0.25"])


def test_an_adapter_s_file_names_its_backbone(text_adapter, tmp_path, capsys):
    out, adapter = tmp_path / "made.json", ["--adapter", text_adapter]
    printed(capsys, "calibrate", "prefixkv", *adapter, "--out", out, *options(*SHORT["prefixkv"]))
    config = json.loads((text_adapter / "subtoken_config.json").read_text())
    assert json.loads(out.read_text())["backbone"] == config["identity"]
    duo = ["calibrate", "duo_attention", *adapter, "--out", tmp_path / "b.json"]
    assert "calibrated on whole caches" in refused(capsys, *duo)


def test_a_threshold_meets_a_mean_on_the_reader_s_own_prompts(text_adapter, tmp_path, capsys):
    prompts, out, llama = tmp_path / "dev.jsonl", tmp_path / "made.json", text_adapter.parent / "backbone"
    texts = [f"Code {name} amber falcon. " * 30 + "What is the code?" for name in ("baran", "kestrel", "polar")]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = ["calibrate", "threshold", "--backbone", llama, "--out", out, "--data", prompts]
    said = printed(capsys, *words, *options("eviction=keydiff", "keep=0.4", "window=8", "samples=2"))
    content = json.loads(out.read_text())
    numbers, data = content["numbers"], content["data"]
    assert (data["name"], data["samples"], len(data["sha256"])) == ("dev.jsonl", 2, 64)
    assert 0.35 < numbers["mean"] <= 0.4
    assert f"keeps {numbers['mean']:.3%} of the entries in scope" in said
    answer = ["--prompt", texts[0], "--max-new-tokens", "1", "--eviction", "keydiff"]
    answer += ["--eviction-keep", f"threshold:{out}"]
    said = printed(capsys, "generate", "--backbone", llama, *answer)
    assert f"window=8 mean {numbers['mean']:.4g}" in said
    assert "this backbone is another one" in refused(capsys, "generate", "--backbone", TINY, *answer)


@pytest.mark.parametrize(("method", "model", "samples"), [("duo_attention", TINY, 200), ("sparsemm", LLAVA, 50)])
def test_shipped_files_are_of_the_shipped_models(method, model, samples):
    made = build_eviction(method, calibration=str(CHECKPOINTS / f"calibrations/{model.name}_{method}.json")).calibrated
    check_calibration(made, load_family(BackboneConfig(str(model))))
    assert (made.backbone.path, made.data.samples) == (f"checkpoints/{model.name}", samples)
    other = load_family(BackboneConfig(str(TINY if model == LLAVA else LLAVA)))
    refuses("this backbone is another one", check_calibration, made, other)


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """A copy of the tiny Llama on other axes."""
    out = tmp_path_factory.mktemp("axes") / "turned"
    assert main(["axes", str(TINY), str(out), "--samples", "4"]) == 0
    return out


def test_a_copy_on_axes_answers_alike_and_says_whose_axes_it_has(turned):
    prompt = torch.arange(5, 200)[None]
    whole, copy = (SubTokenModel.from_pretrained(path).backbone.model for path in (TINY, turned))
    with torch.no_grad():
        expected, found = whole(prompt).logits, copy(prompt).logits
    assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))
    assert len(json.loads((turned / "config.json").read_text())["value_axes"]) == 64
    assert "value_axes" not in json.loads((TINY / "config.json").read_text())
    assert (turned / "tokenizer.json").exists()


def test_what_axes_refuses(capsys, turned):
    assert refused(capsys, "axes", TINY, turned) == f"{turned} exists; name another folder, or remove it"
    files = sorted((CHECKPOINTS / "adapters").glob("*/subtoken_config.json"))
    of_tiny = next(path for path in files if json.loads(path.read_text())["backbone"]["path"].endswith("tiny-llama"))
    refuses("load the backbone that it names", SubTokenModel.from_pretrained, of_tiny.parent, backbone=str(turned))


def test_a_model_that_takes_images_reads_records(tmp_path, capsys):
    out, records = tmp_path / "turned", ROOT / "data/samples/questions.json"
    said = printed(capsys, "axes", LLAVA, out, "--data", records, "--samples", 2, "--dtype", "bfloat16")
    assert said.startswith(f"{out} answers as {LLAVA} does (its last states moved by ")
    config = json.loads((out / "config.json").read_text())
    assert ("value_axes" in config, config["dtype"]) == (True, "bfloat16")
