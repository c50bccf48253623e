"""Which file a recipe's name means, and ``recipes``: listing, showing, copying, and anchors."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from subtoken_train import resources
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe_source import read_source
from subtoken_train.resources import find_recipe, recipe_files, recipe_text, resource_root
from tests.support.commands import printed, refused
from tests.support.places import ROOT, recipe
from tests.support.sampling import sampled
from tests.support.training_memory import tiny_fit

TINY = recipe("tiny_fastv25_s16k4")
SPELLINGS = (
    "tiny_fastv25_s16k4",
    "tiny_fastv25_s16k4.yaml",
    "recipes/tiny_fastv25_s16k4.yaml",
    "recipes/tiny_fastv25_s16k4",
    "recipes/tiny/tiny_fastv25_s16k4.yaml",
    "tiny/tiny_fastv25_s16k4",
    "/clone/recipes/tiny_fastv25_s16k4.yaml",
)


@pytest.mark.parametrize("inside", [True, False], ids=["clone", "elsewhere"])
def test_one_recipe_in_every_folder(monkeypatch, tmp_path, inside):
    monkeypatch.chdir(ROOT if inside else tmp_path)
    assert {find_recipe(given).resolve() for given in SPELLINGS} == {TINY}


ELSEWHERE = {
    "recipes/strategy/ddp.yaml": "strategy/ddp.yaml",
    "recipes/eval/table1_llava7b.yaml": "eval/table1_llava7b.yaml",
    "qlora_nf4": "memory/qlora_nf4.yaml",
    "mine/tiny_fastv25_s16k4.yaml": None,
    "../tiny_fastv25_s16k4.yaml": None,
    "recipes/llava7b/tiny_fastv25_s16k4.yaml": None,
    "tiny_fastv25_s16k3": None,
    "recipes": None,
}


def test_overlays_and_grids_too_and_what_is_missing_elsewhere_is_missing():
    assert list(map(find_recipe, ELSEWHERE)) == [file and ROOT / "recipes" / file for file in ELSEWHERE.values()]


@pytest.mark.parametrize("given", ["tiny_fastv25_s16k4", "recipes/tiny_fastv25_s16k4.yaml"])
def test_a_file_of_ones_own_goes_first(given):
    mine = Path(given)
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("output_dir: runs/mine\n")
    assert find_recipe(given) == mine
    assert read_source(["--config", given]).contents == ({"output_dir": "runs/mine"},)


def test_an_installed_package_finds_its_own(monkeypatch, tmp_path):
    (tmp_path / "_bundled" / "recipes").mkdir(parents=True)
    shutil.copy(TINY, tmp_path / "_bundled" / "recipes")
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert resource_root() == tmp_path / "_bundled"
    for given in SPELLINGS:
        assert find_recipe(given) == tmp_path / "_bundled" / "recipes" / TINY.name
    assert find_recipe("llava7b_fastv25_s16k4") is None


def test_fit_takes_an_overlay_by_name(capsys):
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", "tiny_fastv25_s16k4", "--config", "ddp", "--print_config"])
    assert done.value.code in (0, None)
    assert "strategy: ddp" in capsys.readouterr().out


TEXT = "# Tiny run, 15.625 % KV\n\nmodel: tiny\n"


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    (folder / "recipes" / "eval").mkdir(parents=True)
    (folder / "recipes" / "tiny_a.yaml").write_text(TEXT)
    (folder / "recipes" / "eval" / "b.yaml").write_text("model: x\n")
    monkeypatch.setattr(resources, "resource_root", lambda: folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_library_is_listed_shown_and_copied(library, tmp_path, capsys):
    assert printed(capsys, "recipes", "ls") == "eval/\n  b\ntiny/\n  tiny_a  Tiny run, 15.625 % KV\n"
    for name in ("tiny_a", "tiny_a.yaml", "tiny/tiny_a", "recipes/tiny_a.yaml"):
        assert printed(capsys, "recipes", "show", name) == TEXT
    assert printed(capsys, "recipes", "copy", "tiny_a", "mine.yaml") == "wrote mine.yaml\n"
    assert printed(capsys, "recipes", "copy", "tiny_a") == "wrote tiny_a.yaml\n"
    assert (tmp_path / "mine.yaml").read_text() == (tmp_path / "tiny_a.yaml").read_text() == TEXT
    (tmp_path / "mine.yaml").write_text("mine\n")
    words = "mine.yaml exists; name another file, or pass --overwrite"
    assert words in refused(capsys, "recipes", "copy", "tiny_a", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "mine\n"
    for target in (tmp_path / "mine.yaml", library / "recipes" / "tiny_a.yaml"):  # and onto itself
        assert main(["recipes", "copy", "tiny_a", str(target), "--overwrite"]) == 0
        assert target.read_text() == TEXT
    for action in ("show", "copy"):
        assert "unknown recipe 'tiny_b'. Did you mean 'tiny_a'?" in refused(capsys, "recipes", action, "tiny_b")


def test_every_shipped_recipe_is_listed_with_a_comment_and_words_choose(capsys):
    lines = printed(capsys, "recipes", "ls").splitlines()
    rows = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert len(rows) == len(recipe_files())
    assert all(len(row) == 2 for row in rows), "a recipe opens with a comment that says what it is"
    folders = sorted({f"{name.partition('/')[0]}/" for name in recipe_files()})
    assert [line for line in lines if not line.startswith("  ")] == folders
    chosen = printed(capsys, "recipes", "ls", "LLaVA-1.5-13B", "visionzip25_s4").splitlines()
    assert [line.split()[0] for line in chosen] == ["llava13b/", "llava13b_visionzip25_s4k1"]
    assert "no recipe has gpt5 and fastv in its name or first line" in refused(capsys, "recipes", "ls", "gpt5", "fastv")


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m subtoken_train recipes ls | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)


SHIPPED = ["tiny_fastv25_s16k4_gated", "tinylm_quest25_s8k6", "llava7b_prumerge12p5_s16k4", "qwenvl3b_fastv25_s16k4"]


@sampled("name", SHIPPED, every=2)
def test_the_shipped_anchors(tmp_path, capsys, name):
    target = tmp_path / f"{name}_anchor.yaml"
    assert f"wrote {target}" in printed(capsys, "recipes", "anchor", recipe(name), tmp_path)
    made, shipped = map(yaml.safe_load, (target.read_text(), recipe_text(recipe(f"{name}_anchor"))))
    for content in (made, shipped):
        content["model"].setdefault("routing", None)  # no routing at all is routing null
    assert made == shipped


def test_a_file_that_is_there_stays(tmp_path, capsys):
    path = tmp_path / "tiny_fastv25_s16k4_anchor.yaml"
    path.write_text("mine")
    argv = ["recipes", "anchor", "tiny_fastv25_s16k4"]
    assert "exists; name another file, or pass --overwrite" in refused(capsys, *argv)
    assert path.read_text() == "mine"
    assert main([*argv, "--overwrite"]) == 0
    assert path.read_text().startswith("# matched token-only anchor of tiny_fastv25_s16k4 · 15.625 % of the tokens")


def changed(tmp_path, **reducer_and_routing):
    content = yaml.safe_load(recipe("tiny_fastv25_s16k4").read_text())
    content["model"]["backbone"]["path"] = str(ROOT / "checkpoints" / "tiny-llava")
    for key, values in reducer_and_routing.items():
        content["model"][key] = None if values is None else {**content["model"][key], **values}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"routing": None}, "the recipe routes nothing (model.routing is null), so it has no anchor"),
        ({"routing": {"kept_groups": 16}}, "the recipe keeps all 16 groups"),
        ({"reducer": {"name": "none", "keep_ratio": 1.0}}, "reducer 'none' keeps every token"),
    ],
)
def test_what_has_no_anchor(tmp_path, capsys, settings, words):
    assert words in refused(capsys, "recipes", "anchor", changed(tmp_path, **settings), tmp_path)
    assert not (tmp_path / "mine_anchor.yaml").exists()


@pytest.mark.parametrize(
    ("settings", "tokens", "gated"),
    [
        # below the cut the routed arm holds every token whole, as its anchor does: above it 16 tokens, 4 of 16 groups
        ({"reducer": {"stage": "decoder", "layer": 2}}, 10, False),
        # 16 tokens with 3 of 16 groups are 9.5 whole ones; a stored mean is half a token more
        *[
            ({"routing": {"kept_groups": 3, "fill": fill, "value_gate": gated}}, tokens, gated)
            for fill, tokens in (("mean", 10), ("zero", 9.5))
            for gated in (False, True)
        ],
    ],
)
def test_an_anchor_has_its_arms_real_bytes_and_fills_nothing(tmp_path, settings, tokens, gated):
    assert main(["recipes", "anchor", str(changed(tmp_path, **settings)), str(tmp_path)]) == 0
    model = yaml.safe_load((tmp_path / "mine_anchor.yaml").read_text())["model"]
    assert model["reducer"]["keep_ratio"] == tokens / 64
    routing = model["routing"]
    assert (routing and (routing["kept_groups"], routing["fill"])) == ((16, "zero") if gated else None)


def test_a_stage_2_recipe_gives_the_anchor_of_one_stage(tmp_path, tiny_family, capsys):
    argv, short = tiny_fit(tmp_path, tiny_family), "--trainer.max_steps=1"
    assert main(argv(short, "--model.routing=null", "--model.lora.rank=4", output="first")) == 0
    second = [f"--model.stage2.adapter={tmp_path / 'first' / 'adapter'}", "--model.lora=null"]
    assert main(argv(short, *second, "--anchor")) == 0
    config = json.loads((tmp_path / "run_anchor" / "adapter" / "subtoken_config.json").read_text())
    assert (config["stage2"], config["routing"], config["lora"]["rank"]) == (None, None, 4)
