"""The example package of the docs, installed: its methods are listed, not imported for a list, and run."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, Grid, TaskSpec
from subtoken_train.evaluation.tasks import TASKS
from subtoken_train.evictions import EVICTIONS
from subtoken_train.families import FAMILIES
from subtoken_train.families.backbone_config import BackboneConfig, resolve
from subtoken_train.families.load import load_family
from subtoken_train.reducers import REDUCERS
from subtoken_train.resources import find_recipe
from subtoken_train.routing import SELECTORS
from subtoken_train.training.loss import LOSSES
from subtoken_train.types import Region
from tests.support.commands import printed, refused
from tests.support.eval_runs import ADAPTERS
from tests.support.helpers import compress, make_batch
from tests.support.places import ROOT

PACKAGE = ROOT / "docs" / "example_package"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDED = {
    **{"oldest": EVICTIONS, "leading": REDUCERS, "low_rank": SELECTORS, "focal": LOSSES},
    **{"arcee": FAMILIES, "capitals": TASKS},
}


def imported() -> set[str]:
    return {name for name in sys.modules if name.startswith("more_methods.")}


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch) -> Iterator[Path]:
    """Return a folder of packages with ``more_methods``, as pip would install it; nothing of it is known elsewhere."""
    root = tmp_path / "site"
    shutil.copytree(PACKAGE / "more_methods", root / "more_methods", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = root / "more_methods-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n"
    )
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())])
        for group, entries in PROJECT["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups) + "\n")
    monkeypatch.syspath_prepend(root)
    _forget()
    yield root
    _forget()


def _forget() -> None:
    for name, registry in ADDED.items():
        vars(registry).pop("_installed", None)
        registry._classes.pop(name, None)
    for name in ("more_methods", *imported()):
        sys.modules.pop(name, None)


def test_the_line_of_the_page_works_on_a_text_recipe(capsys):
    page = (ROOT / "docs" / "own_router.md").read_text(encoding="utf-8")
    options = [each for line in re.findall(r"`(--model\.[^`]+)`", page) for each in line.split()]
    assert len(options) == 4
    assert "rank" in printed(capsys, "check", "--offline", "--config", "tinylm_quest25_s16k12", *options)


def test_names_are_listed_and_nothing_is_imported(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    out = capsys.readouterr().out
    assert "oldest" in out
    assert "leading" in out
    assert all(name in registry and name in list(registry) for name, registry in ADDED.items())
    assert "Did you mean 'capitals'?" in refused(capsys, "data", "capital")
    said = refused(capsys, "data", "capitals", "--option", "time=3")
    assert "unknown option of task capitals 'time'. Did you mean 'times'?" in said
    assert imported() == {"more_methods.capitals"}


@pytest.mark.slow
@torch.no_grad()
def test_the_reducer_shortens_a_pass_and_is_checked_in_a_recipe(tiny_family, tmp_path):
    batch = make_batch([(1, 9)])
    kept = compress(tiny_family, name="leading", keep_ratio=0.25).run(batch).rows
    assert (batch.regions_BN == Region.VISUAL).sum() == 64
    assert (kept.regions_BM == Region.VISUAL).sum() == 16
    recipe = yaml.safe_load(find_recipe("tiny_fastv25_s16k4").read_text())
    recipe["model"]["reducer"] = {"name": "leading", "keep_ratio": 0.5, "last": True}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    cli = RecipeCLI(["--config", str(tmp_path / "mine.yaml")])
    assert cli.model.reducer_config == REDUCERS["leading"](keep_ratio=0.5, last=True)
    assert cli.resolved()["model"]["reducer"] == {**recipe["model"]["reducer"], "round_up": False}
    with pytest.raises(ValueError, match=r"Allowed in model.reducer: keep_ratio, last, matches, name, round_up"):
        RecipeCLI(["--config", str(tmp_path / "mine.yaml"), "--model.reducer.layer=2"])


def test_the_family_is_loaded_and_answers(tmp_path, capsys):
    from transformers import ArceeConfig, ArceeForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1280, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path / "arcee"
    ArceeForCausalLM(ArceeConfig(**sizes, **heads)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve("checkpoints/tiny-llama")) / name, folder)
    family = load_family(BackboneConfig(str(folder)))
    assert type(family) is FAMILIES["arcee"]
    assert family.shape.num_layers == 2
    argv = ["--backbone", str(folder), "--prompt", "a b c " * 30, "--max-new-tokens", "2"]
    assert main(["generate", *argv, "--eviction", "oldest", "--eviction-keep", "8tokens"]) == 0, capsys.readouterr().err


def test_the_task_is_answered_in_a_grid(tmp_path):
    arm = ArmSpec(adapter=f"{ADAPTERS}/tinylm_lora_only", eviction="oldest", eviction_keep=0.5)
    tasks = (TaskSpec("capitals", options={"times": 2}),)
    (folder,) = run_grid(Grid(arms=(arm,), tasks=tasks, out=tmp_path / "out", batch_size=2, anchors="none", limit=2))
    assert list(read_samples(folder)) == ["France", "Japan"]


MINE = [
    *("--model.routing.selector=low_rank", "--model.routing.selector_options.rank=4"),
    *("--model.routing.query_conditioned=false", "--model.loss=focal", "--model.loss_options={gamma: 3}"),
]
TINY = [
    "--config", "tinylm_quest25_s16k12", "--data.context_length=256", "--data.num_facts=6", "--data.num_questions=4",
]  # fmt: skip


def ran(*words: object, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with the package or without."""
    path = os.pathsep.join(map(str, [ROOT] if site is None else [ROOT, site]))
    command = [sys.executable, "-m", "subtoken_train", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True, check=False
    )


@pytest.mark.slow
def test_router_and_loss_are_checked_trained_exported_and_loaded_elsewhere(tmp_path, site, capsys):
    assert main(["check", *TINY, *MINE, "--offline"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "S16K12 low_rank, rank 4, activation False" in said
    assert "loss       focal, gamma 3.0" in said
    run, folder = tmp_path / "run", tmp_path / "exported"
    short = [
        "--trainer.max_steps=3", "--data.batch_size=2", f"--output_dir={run}", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    assert main(["fit", *TINY, *MINE, *short]) == 0, capsys.readouterr().err
    assert main(["export", str(run / "checkpoints"), str(folder)]) == 0, capsys.readouterr().err
    record = json.loads((folder / "subtoken_config.json").read_text())
    assert record["packages"] == [{"kind": "selector", "name": "low_rank", "requirement": "more_methods==1.0"}]
    assert record["routing"]["selector_options"] == {"rank": 4, "activation": False}
    assert record["training"]["loss"] == {"name": "focal", "gamma": 3.0}
    card = (folder / "README.md").read_text()
    assert "rank 4" in card
    assert "Install `more_methods==1.0` first, which brings its selector `low_rank`." in card
    assert "a loss of its own (name focal, gamma 3.0)" in card
    words = ["generate", "--adapter", folder, "--prompt", "one two three four five. " * 30, "--max-new-tokens", 2]
    there = ran(*words, site=site)
    assert there.returncode == 0, there.stderr
    missing = ran(*words)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
    assert "selector 'low_rank' comes from package more_methods, which is not installed here" in missing.stderr
    assert missing.stderr.endswith("pip install more_methods==1.0\n")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model.routing.selector_options.rnk=4", "routing.selector_options: unknown key 'rnk'. Did you mean 'rank'?"),
        ("--model.routing.selector_options={rank: 0}", "low_rank rank is 0; it must be 1 or more"),
        ("--model.routing.selector_options=4", "model.routing.selector_options is 4; it must be a group of keys"),
        ("--model.loss=focl", "unknown loss 'focl'. Did you mean 'focal'?"),
        ("--model.loss_options={gama: 1}", "model.loss_options: unknown key 'gama'. Did you mean 'gamma'?"),
        ("--model.loss_options=4", "model.loss_options is 4; it must be a group of keys"),
    ],
)
def test_mistakes_in_a_recipe_are_one_line(capsys, option, words):
    assert words in refused(capsys, "check", *TINY, *MINE, option, "--offline")
