"""``recipes anchor`` and ``fit --anchor``: the shipped anchors from their recipes, and what has no anchor."""

import json

import pytest
import yaml

from subtoken_train.cli.main import main
from subtoken_train.resources import recipe_text
from tests.support.commands import refused
from tests.support.places import ROOT, recipe
from tests.support.sampling import sampled
from tests.support.tiny_fits import tiny_fit


def plain(content):
    """A recipe as it is compared: no routing at all is routing null."""
    content["model"].setdefault("routing", None)
    return content


@sampled(
    "name",
    [
        "tiny_fastv25_s16k4",
        "tiny_fastv12p5_s16k4",
        "tiny_fastv25_s16k4_gated",
        "tinylm_quest25_s8k6",
        "llava7b_visionzip12p5_s16k4",
        "llava7b_prumerge12p5_s16k4",
        "llava7b_sparsevlm25_s16k4",
        "tiny_sparsevlm50_s16k4",
        "qwenvl3b_fastv25_s16k4",
    ],
    every=3,
)
def test_the_shipped_anchors(tmp_path, capsys, name):
    source = recipe(name)
    shipped = yaml.safe_load(recipe_text(recipe(f"{name}_anchor")))
    assert main(["recipes", "anchor", str(source), str(tmp_path)]) == 0
    target = tmp_path / f"{name}_anchor.yaml"
    assert f"wrote {target}" in capsys.readouterr().out
    assert plain(yaml.safe_load(target.read_text())) == plain(shipped)


def test_a_file_that_is_there_stays(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny_fastv25_s16k4_anchor.yaml"
    path.write_text("mine")
    assert "exists; name another file, or pass --overwrite" in refused(
        capsys, "recipes", "anchor", "tiny_fastv25_s16k4"
    )
    assert path.read_text() == "mine"
    assert main(["recipes", "anchor", "tiny_fastv25_s16k4", "--overwrite"]) == 0
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
        ({"reducer": {"stage": "nowhere"}}, "unknown model.reducer.stage 'nowhere'"),
    ],
)
def test_what_has_no_anchor(tmp_path, capsys, settings, words):
    assert words in refused(capsys, "recipes", "anchor", changed(tmp_path, **settings), tmp_path)
    assert not (tmp_path / "mine_anchor.yaml").exists()


def test_the_decoder_stage_is_solved_from_the_ledger(tmp_path):
    path = changed(tmp_path, reducer={"stage": "decoder", "layer": 2})
    assert main(["recipes", "anchor", str(path), str(tmp_path)]) == 0
    ratio = yaml.safe_load((tmp_path / "mine_anchor.yaml").read_text())["model"]["reducer"]["keep_ratio"]
    # below the cut the routed arm holds every token whole, as its anchor does: above it 16 tokens with 4 of 16 groups
    assert ratio == 10 / 64


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("fill", "tokens"), [("mean", 10), ("zero", 9.5)])
def test_a_filled_arms_anchor_has_its_real_bytes_and_fills_nothing(tmp_path, fill, tokens, gated):
    """16 tokens with 3 of 16 groups are 9.5 whole ones; a stored mean is half a token more."""
    path = changed(tmp_path, routing={"kept_groups": 3, "fill": fill, "value_gate": gated})
    assert main(["recipes", "anchor", str(path), str(tmp_path)]) == 0
    model = yaml.safe_load((tmp_path / "mine_anchor.yaml").read_text())["model"]
    assert model["reducer"]["keep_ratio"] == tokens / 64
    if gated:
        assert (model["routing"]["kept_groups"], model["routing"]["fill"]) == (16, "zero")
    else:
        assert model["routing"] is None


@pytest.mark.slow
def test_fit_trains_it_beside_the_run(tmp_path, tiny_family, capsys):
    argv = tiny_fit(tmp_path, tiny_family)
    assert main(argv("--trainer.max_steps=1", "--anchor")) == 0
    config = json.loads((tmp_path / "run_anchor" / "adapter" / "subtoken_config.json").read_text())
    assert config["routing"] is None
    assert config["reducer"]["round_up"]
    assert config["reducer"]["keep_ratio"] == 0.15625
    assert not (tmp_path / "run").exists()
    capsys.readouterr()
    assert "routes nothing" in refused(capsys, *argv("--anchor", "--model.routing=null"))


def test_a_stage_2_recipe_gives_the_anchor_of_one_stage(tmp_path, tiny_family, capsys):
    argv = tiny_fit(tmp_path, tiny_family)
    short = "--trainer.max_steps=1"
    assert main(argv(short, "--model.routing=null", "--model.lora.rank=4", output="first")) == 0
    second = [f"--model.stage2.adapter={tmp_path / 'first' / 'adapter'}", "--model.lora=null"]
    assert main(argv(short, *second, "--anchor")) == 0
    config = json.loads((tmp_path / "run_anchor" / "adapter" / "subtoken_config.json").read_text())
    assert (config["stage2"], config["routing"], config["lora"]["rank"]) == (None, None, 4)
