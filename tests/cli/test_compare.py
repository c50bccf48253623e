"""``subtoken-train compare``: arms take the same bytes, the text is the run's own, the advice follows the intervals."""

from types import SimpleNamespace

import pytest
import yaml

from subtoken_train.cli.compare import advice, arms_of, own_text
from subtoken_train.cli.main import main
from subtoken_train.evaluation.reporting import score_tables
from tests.support.commands import printed, refused
from tests.support.places import ROOT

RECIPE = {
    "model": {
        "backbone": {"path": "checkpoints/tiny-llama", "dtype": "bfloat16"},
        "reducer": {"name": "quest", "keep_ratio": 0.25, "matches": None, "page_size": 8},
        "routing": {"num_groups": 16, "kept_groups": 12, "byte_share": 1.0},
    },
    "data": {"train": {"name": "mine/train.jsonl"}},
}


def test_untrained_arms_take_the_bytes_of_the_trained_one(tmp_path):
    arms = {arm["name"]: arm for arm in arms_of(RECIPE, tmp_path / "mine")}
    assert list(arms) == ["full", "trained", "kvzip", "bits_int4_rotated", "groups_by_norm"]
    assert arms["kvzip"]["eviction_keep"] == 0.25 * (1 + 12 / 16) / 2
    assert (arms["groups_by_norm"]["reducer"], arms["groups_by_norm"]["groups"]) == ("quest", "16,12")
    assert arms["groups_by_norm"]["reducer_options"] == {"page_size": 8}
    (tmp_path / "mine_anchor/adapter").mkdir(parents=True)
    assert arms_of(RECIPE, tmp_path / "mine")[-1]["adapter"] == str(tmp_path / "mine_anchor/adapter")


def test_a_byte_budget_is_compared_at_its_share(tmp_path):
    routing = {"num_groups": 12, "kept_groups": 12, "budget": "bytes", "byte_share": 0.5}
    arms = arms_of({"model": {**RECIPE["model"], "reducer": {"name": "none"}, "routing": routing}}, tmp_path)
    assert [arm["name"] for arm in arms] == ["full", "trained", "kvzip", "bits_int8"]
    assert arms[2]["eviction_keep"] == 0.5


def test_the_text_is_the_runs_own_test_set(tmp_path, capsys):
    recipe = {"data": {"train": {"name": str(tmp_path / "train.jsonl")}}}
    assert own_text(recipe, None) == ""
    (tmp_path / "test.jsonl").write_text('{"text": "a b"}\n\n{"messages": []}\n{"text": "c"}\n')
    assert own_text(recipe, None) == "a b\nc"
    assert capsys.readouterr().err.endswith("test.jsonl: 1 of 3 records hold no text\n")
    (tmp_path / "own.txt").write_text("d")
    assert own_text(recipe, str(tmp_path / "own.txt")) == "d"


def written(folder, recipe):
    (folder / "adapter").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_what_cannot_be_compared_is_said_in_one_line(tmp_path, capsys):
    assert "has no adapter; train it first" in refused(capsys, "compare", tmp_path)
    pictures = written(tmp_path / "a", {**RECIPE, "data": {"train_file": "x.json"}})
    assert "compare is for runs on texts; on pictures: subtoken-train evaluate" in refused(capsys, "compare", pictures)
    plain = written(tmp_path / "b", {**RECIPE, "model": {"backbone": {"path": "x"}}})
    assert "trained no router" in refused(capsys, "compare", plain)
    texts = written(tmp_path / "c", RECIPE)
    assert "nowhere.txt is not a file" in refused(capsys, "compare", texts, "--text", "nowhere.txt")
    (tmp_path / "few.txt").write_text("a b c")
    assert "the text has 3 words" in refused(capsys, "compare", texts, "--text", tmp_path / "few.txt")


@pytest.mark.slow
def test_from_own_texts_to_a_table_and_a_sentence(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for name in ("memory", "evaluation", "resume", "launch", "tasks", "serving", "speed", "budgets", "python"):
        (tmp_path / f"texts/{name}.md").write_text((ROOT / f"docs/{name}.md").read_text())
    few = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    assert main(["init", "texts"]) == 0
    assert main(["fit", "--config", "texts_subtoken/texts.yaml", *few]) == 0
    assert main(["fit", "--config", "texts_subtoken/texts_anchor.yaml", *few]) == 0
    capsys.readouterr()
    said = printed(capsys, "compare", "runs/texts", "--contexts", "2")
    assert "the text's loss decides: in 21." in said.splitlines()[-1]  # the embedded model reads no facts in words
    assert "% of the compressed text's bytes trained has" in said.splitlines()[-1]
    assert "int8" not in said.splitlines()[-1]  # which takes more bytes
    out = tmp_path / "runs/texts/compare"
    assert {"report.md", "report.csv", "report.tex", "report.html"} <= {x.name for x in (out / "report").iterdir()}
    arms = {path.parent.parent.name for path in out.glob("*/*/manifest.json")}
    assert arms == {"full", "trained", "anchor", "kvzip", "groups_by_norm", "bits_int8"}
    assert (out / "trained/text_loss/manifest.json").is_file()
    assert main(["compare", "runs/texts", "--contexts", "2"]) == 0  # a second run answers nothing anew


def test_a_model_alone_is_compared_with_its_full_cache(tmp_path, capsys):
    assert main(["compare", str(ROOT / "checkpoints/tiny-llama"), "--contexts", "1", "--out", "run/compare"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("the full cache recalls none of these facts, so they tell no cache apart: --text FILE")
    assert len(list((tmp_path / "run/compare").glob("*/facts/manifest.json"))) == 5
    assert main(["report", "run"]) == 0
    assert " written to run/compare/report\n" in capsys.readouterr().out


def test_where_no_fact_tells_arms_of_a_size_apart_the_loss_does(monkeypatch):
    shares, losses = {"full": 1, "b22": 0.2159, "b42": 0.2165}, {"full": 3, "b22": 3.4, "b42": 3.1}

    def of(arm, tasks, other=None):
        by = (1.0 if tasks == ["facts"] else losses[arm.name]) - (0 if other is None else of(other, tasks).value)
        return score_tables.Estimate(
            by, by, by, 0, 4, "points" if tasks != ["facts"] else "fraction", signed=other is not None, falling=True
        )

    cost = lambda arm, tasks: SimpleNamespace(shares={"measured": shares[arm.name]})  # noqa: E731
    for name, own in {
        "score_of": of,
        "difference_of": lambda arm, other, tasks: of(arm, tasks, other),
        "cost_of": cost,
    }.items():
        monkeypatch.setattr(score_tables, name, own)
    report = SimpleNamespace(arms=[SimpleNamespace(name=name) for name in shares], task_names=["facts", "text_loss"])
    said = "b42 has 100.00 % of the facts and is not told apart from full by these 4 questions (raise --contexts); in"
    assert f"{said} text_loss it is behind full (+0.10 [+0.10, +0.10], paired, 4 samples): take b42" in advice(report)
