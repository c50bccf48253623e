"""``subtoken-train export``: what a run, a checkpoint or an adapter becomes, and mistakes in one line."""

import json
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from subtoken_train import SubTokenModel
from subtoken_train.cli.fit_course import export
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.scenes import write_scenes
from subtoken_train.training.checkpoints import Marker, begin, seal
from subtoken_train.training.trained_tensors import shapes_of
from tests.support.commands import printed, refused
from tests.support.helpers import drawn_llava, make_batch, save_backbone
from tests.support.places import recipe
from tests.support.run_folders import adapter_tensors, same_tensors
from tests.support.sampling import sampled

RECIPE = recipe("tiny_fastv25_s16k4")
STEPS = 2


def train(root, name, *extra):
    """A finished run in ``root/name`` with one checkpoint folder."""
    run = root / name
    short = ["--data.batch_size=4", f"--trainer.max_steps={STEPS}", "--trainer.enable_progress_bar=false"]
    places = [f"--model.backbone.path={root / 'backbone'}", f"--data.train_file={root / 'scenes' / 'train.json'}"]
    quiet = ["--trainer.enable_model_summary=false", "--model.optimizer.warmup_steps=0"]
    cli = RecipeCLI(["--config", str(RECIPE), *places, *short, *quiet, f"--output_dir={run}", *extra])
    run.mkdir()
    (run / "recipe.yaml").write_text(cli.recipe_text())
    cli.trainer.fit(cli.model, cli.datamodule)
    partial = begin(run / "checkpoints", STEPS)
    cli.trainer.save_checkpoint(partial / "state.ckpt")
    seal(partial, Marker(STEPS, 1, "SingleDeviceStrategy", shapes_of(cli.model.trained())))
    export(cli, run)
    return run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    save_backbone(drawn_llava(4), folder / "backbone")
    write_scenes(folder / "scenes", train=12, dev=6, test=4)
    return folder


@pytest.fixture(scope="module")
def run(root):
    """A jointly trained run whose reducer cuts at layer 2: the routers below never train."""
    return train(root, "joint", "--model.reducer.stage=decoder")


@pytest.fixture(scope="module")
def second(root):
    """Stage 2 with a LoRA on ``o_proj``, on a token-only run."""
    first = train(root, "first", "--model.routing=null")
    output = '--model.stage2.output_lora={"rank": 2, "alpha": 4, "dropout": 0.0}'
    return train(root, "second", "--model.lora=null", f"--model.stage2.adapter={first / 'adapter'}", output)


def record(folder):
    return json.loads((folder / "subtoken_config.json").read_text())


def logits(folder, **source):
    with torch.no_grad():
        model = SubTokenModel.from_pretrained(folder, **source).backbone
        return model.logits(model.run(make_batch([(1, 8), (0, 5)])))


def test_a_checkpoint_becomes_the_adapter_that_fit_wrote(run, tmp_path, capsys):
    assert main(["export", str(run / "checkpoints" / f"step-{STEPS}"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"adapter folder: {tmp_path / 'out'}\n"
    ours, theirs = adapter_tensors(tmp_path / "out"), adapter_tensors(run / "adapter")
    assert ours.keys() == theirs.keys()
    below = re.compile(r"router.*selectors\.[01]\.")  # of the layers below the cut, which never run
    different = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert all(below.match(name) for name in different)
    assert torch.equal(logits(tmp_path / "out"), logits(run / "adapter"))
    assert record(tmp_path / "out") == record(run / "adapter")
    assert (tmp_path / "out" / "README.md").read_text() == (run / "adapter" / "README.md").read_text()


def test_a_run_gives_its_adapter_else_its_newest_checkpoint(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "from_adapter")]) == 0
    moved = tmp_path / "joint"
    shutil.copytree(run, moved)
    shutil.rmtree(moved / "adapter")
    (begin(moved / "checkpoints", 99) / "state.ckpt").write_bytes(b"half")
    assert main(["export", str(moved), str(tmp_path / "from_checkpoint")]) == 0
    ours, theirs = logits(tmp_path / "from_adapter"), logits(tmp_path / "from_checkpoint")
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, logits(run / "adapter"))
    assert (tmp_path / "from_adapter" / "recipe.yaml").read_text() == (run / "recipe.yaml").read_text()
    out = tmp_path / "from_adapter"
    before = adapter_tensors(out)
    assert "exists; choose another folder or pass --overwrite" in refused(capsys, "export", run, out)
    assert main(["export", str(out), str(out), "--overwrite"]) == 0
    assert same_tensors(adapter_tensors(out), before)


@sampled("kind", ["run", "second"], every=2)
def test_merged_weights_give_the_same_logits(request, kind, tmp_path, capsys):
    run, out = request.getfixturevalue(kind), tmp_path / "merged"
    assert f"merged checkpoint: {out}" in printed(capsys, "export", str(run), str(out), "--merge-lora")
    assert not (out / "adapter_config.json").exists()
    moved = tmp_path / "elsewhere"
    out.rename(moved)
    assert torch.allclose(logits(moved), logits(run / "adapter"), atol=1e-5)
    plain = AutoModelForImageTextToText.from_pretrained(moved)
    base = AutoModelForImageTextToText.from_pretrained(run.parent / "backbone")
    lora = PeftModel.from_pretrained(base, run / "adapter")
    if kind == "second":
        lora.load_adapter(run / "adapter" / "output", "output")
        lora.base_model.set_adapter(["default", "output"])
    ids = make_batch([(0, 5)]).input_ids_BN
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, lora(input_ids=ids).logits, atol=1e-5)
    assert "is merged and has no LoRA" in refused(capsys, "export", moved, tmp_path / "again")
    with pytest.raises(ValueError, match="is merged and holds its own backbone; leave backbone out"):
        SubTokenModel.from_pretrained(moved, backbone=str(run.parent / "backbone"))


def test_a_merged_language_model(text_adapter, tmp_path, capsys):
    assert main(["export", str(text_adapter), str(tmp_path / "merged"), "--merge-lora"]) == 0
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")).__name__ == "LlamaForCausalLM"
    text, ids = "the bee and the spider met in the garden. " * 12, []
    for folder in (tmp_path / "merged", text_adapter):
        model = SubTokenModel.from_pretrained(folder)
        ids.append(model.generate(**model.inputs(text), max_new_tokens=5, do_sample=False))
        assert model.cache_report().nominal_fraction < 0.4
    assert torch.equal(*ids)


@pytest.mark.slow
def test_the_card(run, root, tmp_path, capsys):
    """Recipe, ledger, scores with intervals, and metadata that the Hub's own reader understands."""
    data = str(root / "scenes" / "dev.json")
    assert main(["evaluate", "--adapter", str(run / "adapter"), "--data", data, "--out", str(tmp_path / "m.json")]) == 0
    assert main(["export", str(run), str(tmp_path / "out"), "--metrics", str(tmp_path / "m.json")]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    scored = json.loads((tmp_path / "m.json").read_text())["runs"][0]
    results = {result.metric_name.split(" [")[0]: result for result in card.data.eval_results}
    together = next(result for name, result in results.items() if name.startswith("all, "))
    assert together.metric_value == pytest.approx(100 * sum(scored["scores"]) / len(scored["scores"]), abs=0.01)
    assert (together.dataset_name, together.dataset_revision) == ("dev.json", scored["data_sha256"])
    assert (card.data.library_name, card.data.base_model) == ("peft", None)  # a folder is no Hub id
    assert (run / "recipe.yaml").read_text().strip() in card.text
    ledger = [" ".join(line.split()) for line in card.text.splitlines()]
    assert {"layers 0-1 system 5 5 2,560 2,560 0 100 %", "visual 64 16 8,192 2,048 32 15.625 %"} <= set(ledger)
    assert re.search(r"\| all \(6, \w+\) \| [\d.]+ \[[\d.]+, [\d.]+\] \|", card.text)


def test_metrics_that_are_none(run, tmp_path, capsys):
    path, out = tmp_path / "m.json", tmp_path / "out"
    words = "is not a file; 'subtoken-train evaluate --out FILE' writes one"
    assert words in refused(capsys, "export", run, out, "--metrics", path)
    for content in ("[1", '{"runs": [{"arm": "x"}]}'):
        path.write_text(content)
        words = "is not a record of 'subtoken-train evaluate --out'"
        assert words in refused(capsys, "export", run, out, "--metrics", path)
    assert not out.exists()


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("nowhere", [], "nowhere is not a folder; name a run (runs/NAME), one of its checkpoints, or an adapter"),
        ("backbone", [], "backbone is neither a run, a checkpoint of one, nor an adapter folder (no subtoken_config"),
        ("joint", ["--private"], "--private only applies when publishing; add --push-to-hub user/name, or leave it"),
        ("joint", ["--push-to-hub", "a/b"], "is not a Hub id, so nobody else could load the adapter; train with its"),
        ("joint", ["--push-to-hub", "a b", "--backbone", "x/y"], "'a b' is not a valid Hub name; write user/name"),
        ("joint", ["--backbone", "first"], "backbone 'first' is neither a folder with a config.json nor a model"),
    ],
)
def test_mistakes(run, second, root, tmp_path, capsys, source, options, words):
    assert words in refused(capsys, "export", root / source, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_an_adapter_into_itself_and_checkpoints_that_cannot_be_exported(run, tmp_path, capsys):
    copy = tmp_path / "joint"
    shutil.copytree(run, copy)
    before = sorted(copy.rglob("*"))
    for flags in ([], ["--overwrite"]):
        words = "adapter, which is being exported; choose a folder outside it"
        assert words in refused(capsys, "export", copy, copy / "adapter/inner", *flags)
    assert sorted(copy.rglob("*")) == before
    shutil.rmtree(copy / "adapter")
    checkpoint, out = copy / "checkpoints" / f"step-{STEPS}", tmp_path / "out"
    (copy / "recipe.yaml").rename(copy / "recipe.txt")
    assert "has no recipe.yaml in" in refused(capsys, "export", checkpoint, out)
    (copy / "recipe.txt").rename(copy / "recipe.yaml")
    marker = json.loads((checkpoint / "COMPLETE").read_text())
    (checkpoint / "COMPLETE").write_text(json.dumps({**marker, "schema_version": 99}))
    assert "99" in refused(capsys, "export", checkpoint, out)
    (checkpoint / "COMPLETE").unlink()
    assert "nor a complete checkpoint" in refused(capsys, "export", copy, out)
    assert "is not a complete checkpoint" in refused(capsys, "export", checkpoint, out)
    assert not out.exists()
